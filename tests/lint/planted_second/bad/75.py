import torch
import torch.nn as nn

torch.autograd.set_detect_anomaly(True)

def train(model, loader, opt):
    model.train()
    crit = nn.MSELoss()
    for x, y in loader:
        opt.zero_grad()
        loss = crit(model(x), y)
        loss.backward()
        opt.step()
