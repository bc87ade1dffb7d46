import torch


def l2(model, reg=1e-6):
    l2_loss = torch.FloatTensor(1)  # here: FLB2112
    for name, param in model.named_parameters():
        if "bias" not in name:
            l2_loss = l2_loss + 0.5 * reg * torch.sum(param**2)
    return l2_loss
