import torch
from torchvision import transforms, datasets
from torchvision.transforms import InterpolationMode

train_tf = transforms.Compose([
    transforms.RandomResizedCrop(224, interpolation=InterpolationMode.BICUBIC),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
])
data = datasets.ImageFolder("train", transform=train_tf)
loader = torch.utils.data.DataLoader(data, 64, shuffle=True, num_workers=8, pin_memory=True)
