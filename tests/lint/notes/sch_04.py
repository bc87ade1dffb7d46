import torch


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)  # here: left, a name that is set twice, as in a page of alternatives
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[50, 70], gamma=0.1)
    return scheduler
