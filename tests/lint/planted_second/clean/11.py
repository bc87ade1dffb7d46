import torch
from torch.optim.lr_scheduler import OneCycleLR

def fit(model, loader, criterion, epochs):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = OneCycleLR(opt, max_lr=1e-2, total_steps=epochs * len(loader))
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.step()
            sched.step()
