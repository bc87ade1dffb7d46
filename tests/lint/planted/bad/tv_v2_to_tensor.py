# planted: line 8, v2.ToTensor is deprecated; use ToImage and ToDtype; since torchvision 0.15
from PIL import Image
from torchvision.transforms import v2

pipeline = v2.Compose([
    v2.Resize(256),
    v2.CenterCrop(224),
    v2.ToTensor(),
    v2.Normalize(mean=[0.5], std=[0.5]),
])
print(pipeline(Image.new("RGB", (300, 300))).dtype)
