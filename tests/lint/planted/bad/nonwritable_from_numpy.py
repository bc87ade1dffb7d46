# planted: line 10, torch.from_numpy of a flipped array: negative strides raise ValueError; in all versions
import cv2
import numpy as np
import torch


def load_rgb(path):
    img = cv2.imread(path)
    img = img[:, :, ::-1]
    return torch.from_numpy(img[:, ::-1]).permute(2, 0, 1).float() / 255


print(load_rgb("cat.jpg").shape)
