import torch
from torch import nn


@torch.inference_mode()
def evaluate(model: nn.Module, loader, device="cpu"):
    was_training = model.training
    model.eval()
    correct = torch.zeros((), device=device, dtype=torch.long)
    count = 0
    for x, y in loader:
        pred = model(x.to(device)).argmax(dim=1)
        correct += (pred == y.to(device)).sum()
        count += len(y)
    model.train(was_training)
    return correct.item() / count
