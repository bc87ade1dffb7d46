# planted: line 3, torchvision.transforms.functional_tensor was removed; since torchvision 0.17
import torch
from torchvision.transforms.functional_tensor import rgb_to_grayscale


def usm(img, weight=0.5):
    gray = rgb_to_grayscale(img)
    residual = img - gray
    return (img + weight * residual).clamp(0, 1)


print(usm(torch.rand(1, 3, 8, 8)).shape)
