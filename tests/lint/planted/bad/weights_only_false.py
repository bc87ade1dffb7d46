# planted: line 7, torch.load(weights_only=False) executes code of the file; since torch 2.6
import torch
import torch.nn as nn


def resume(model: nn.Module, optimizer, path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1
