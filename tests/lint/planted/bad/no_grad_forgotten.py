# planted: line 11, evaluation without torch.no_grad(): the graph is built and kept; in all versions
import torch
import torch.nn as nn


def evaluate(model, loader):
    model.eval()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    total = 0.0
    for x, y in loader:
        out = model(x)
        total += criterion(out, y).item()
    return total / len(loader.dataset)
