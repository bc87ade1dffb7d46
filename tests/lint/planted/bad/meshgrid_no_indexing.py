# planted: line 10, torch.meshgrid without indexing= warns; the default will change; since torch 1.10
import torch


class AnchorGenerator:
    def __init__(self, stride):
        self.stride = stride

    def grid(self, h, w):
        shift_y, shift_x = torch.meshgrid(torch.arange(h), torch.arange(w))
        return torch.stack([shift_x, shift_y], -1).reshape(-1, 2) * self.stride


print(AnchorGenerator(8).grid(2, 3))
