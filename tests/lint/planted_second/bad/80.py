import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
train_set = datasets.ImageFolder("imagenet/train", tf)
train_loader = DataLoader(train_set, batch_size=256, shuffle=True)

for images, target in train_loader:
    print(images.cuda().mean())
    break
