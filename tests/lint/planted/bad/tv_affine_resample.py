# planted: line 9, RandomAffine/RandomRotation(resample=, fillcolor=) were removed; use interpolation=, fill=; since torchvision 0.12
import PIL
import torchvision.transforms as T

augment = T.Compose([
    T.RandomAffine(
        degrees=10,
        translate=(0.1, 0.1),
        resample=PIL.Image.BILINEAR,
    ),
    T.ColorJitter(0.2, 0.2),
    T.ToTensor(),
])
print(augment(PIL.Image.new("RGB", (32, 32))).shape)
