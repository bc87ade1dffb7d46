# planted: line 6, transforms.Scale was removed; use Resize; since torchvision 0.2 / 0.9
import torchvision.transforms as transforms
from PIL import Image

loader = transforms.Compose([
    transforms.Scale(512),
    transforms.ToTensor(),
])


def image_loader(name):
    image = Image.open(name).convert("RGB")
    return loader(image).unsqueeze(0)
