# planted: line 13, ReduceLROnPlateau(verbose=) was removed; since torch 2.7 (deprecated 2.2)
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def build(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    scheduler = ReduceLROnPlateau(
        optimizer,
        mode="max",
        factor=0.5,
        patience=5,
        verbose=True,
    )
    return optimizer, scheduler
