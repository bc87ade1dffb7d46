import random
import torch
from torchvision.transforms.functional_tensor import rgb_to_grayscale

class RandomGray:
    def __init__(self, p=0.2):
        self.p = p

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        if random.random() < self.p:
            return rgb_to_grayscale(img, num_output_channels=3)
        return img
