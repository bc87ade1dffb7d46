# planted: line 10, transforms.RandomSizedCrop was removed; use RandomResizedCrop; since torchvision 0.2 / 0.9
import os

from torchvision import datasets, transforms

normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
train = datasets.ImageFolder(
    os.path.join("imagenet", "train"),
    transforms.Compose([
        transforms.RandomSizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        normalize,
    ]),
)
print(len(train))
