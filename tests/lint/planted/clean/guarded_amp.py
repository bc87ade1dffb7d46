import torch

if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):
    from torch.amp import GradScaler

    scaler = GradScaler("cuda")
else:
    from torch.cuda.amp import GradScaler

    scaler = GradScaler()


def backward(loss):
    scaler.scale(loss).backward()
