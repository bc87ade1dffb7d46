# planted: line 10, torch.cuda.amp.GradScaler is deprecated; use torch.amp.GradScaler('cuda'); since torch 2.4
import torch
from torch.cuda import amp


class Engine:
    def __init__(self, model, optimizer, use_amp=True):
        self.model = model
        self.optimizer = optimizer
        self.scaler = amp.GradScaler(enabled=use_amp)

    def step(self, x, y):
        with torch.autocast("cuda"):
            loss = self.model(x, y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
