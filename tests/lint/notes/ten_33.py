import torch
import torch.nn.functional as F


def loss(model, x, targets):
    return F.mse_loss(model(x), targets)  # here: left, the shapes are not in the file
