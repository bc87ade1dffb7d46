import numpy as np
import torch

class ToTensor:
    def __init__(self, scale=255.0):
        self.scale = scale

    def __call__(self, pic):
        img = np.array(pic, np.uint8, copy=False)
        img = torch.from_numpy(img).permute(2, 0, 1).contiguous()
        return img.float().div(self.scale)
