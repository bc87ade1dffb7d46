# planted: line 11, torch.cuda.amp.autocast is deprecated; use torch.amp.autocast('cuda'); since torch 2.4
import torch
from torch.cuda.amp import autocast
from torch.amp import GradScaler

scaler = GradScaler("cuda")


def train_step(net, opt, criterion, x, y):
    opt.zero_grad()
    with autocast():
        loss = criterion(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()
