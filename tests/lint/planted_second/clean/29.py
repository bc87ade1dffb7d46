import torch

def ema_update(ema, model, decay=0.999):
    with torch.no_grad():
        for pe, p in zip(ema.parameters(), model.parameters()):
            pe.lerp_(p, 1 - decay)
        for be, b in zip(ema.buffers(), model.buffers()):
            be.copy_(b)
