import os

import torch


def save(state):
    path = os.path.join("model", "best.pth.tar")
    torch.save(state, path)  # here: left, whether a folder exists is not in the file
