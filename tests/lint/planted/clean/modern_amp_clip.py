import torch
from torch.nn.utils import clip_grad_norm_

scaler = torch.amp.GradScaler("cuda")


def step(model, optimizer, batch, loss_fn, max_norm=1.0):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(batch["x"]), batch["y"])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()
