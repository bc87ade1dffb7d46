import torch
import torch.nn as nn

criterion = nn.BCELoss()
real_label = 1

def d_loss(netD, real):
    b = real.size(0)
    label = torch.full((b,), real_label, device=real.device)
    output = netD(real).view(-1)
    return criterion(output, label)
