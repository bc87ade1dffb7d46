import torch


def smooth(labels, classes):
    targets = torch.full((labels.size(0), classes), 0.1 / (classes - 1))  # here: left, another definition, not a wrong one
    return targets.scatter_(1, labels.unsqueeze(1), 0.9)
