import torch
from torchvision import transforms
from torchvision.io import read_image

tf = transforms.Compose([
    transforms.ConvertImageDtype(torch.float32),
    transforms.Resize((224, 224)),
    transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
])

img = read_image("dog.jpg")
print(tf(img).mean())
