# planted: line 6, torch.FloatTensor(1) is uninitialised memory, used as an accumulator; in all versions
import torch


def l2_penalty(model, reg=1e-6):
    l2_loss = torch.FloatTensor(1)
    for name, param in model.named_parameters():
        if "bias" not in name:
            l2_loss = l2_loss + 0.5 * reg * torch.sum(param**2)
    return l2_loss


print(l2_penalty(torch.nn.Linear(3, 2)))
