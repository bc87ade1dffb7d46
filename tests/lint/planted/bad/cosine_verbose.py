# planted: line 9, CosineAnnealingLR(verbose=) was removed; since torch 2.7 (deprecated 2.2)
import torch.optim as optim

import config as cfg
from models import build_model

model = build_model(cfg)
opt = optim.AdamW(model.parameters(), lr=cfg.lr)
sched = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cfg.epochs, eta_min=1e-6, verbose=True)

for epoch in range(cfg.epochs):
    for batch in cfg.loader:
        opt.zero_grad()
        model(batch).backward()
        opt.step()
    sched.step()
