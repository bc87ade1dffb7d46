import torch


def distances(x, y):
    n, m, d = x.size(0), y.size(0), x.size(1)
    x = x.unsqueeze(1).expand(n, m, d)
    y = y.unsqueeze(0).expand(n, m, d)
    return torch.sqrt(torch.sum((x - y) ** 2, dim=2))  # here: left, right unless two rows are equal
