# planted: line 13, clip_grad_norm_ before scaler.unscale_ clips scaled gradients; since torch 1.6
import torch
from torch.amp import GradScaler, autocast


def train(model, loader, optimizer, criterion):
    scaler = GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
