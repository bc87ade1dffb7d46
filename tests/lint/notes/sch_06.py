import torch


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda t: t / 10)  # here: FLB448
