# planted: line 10, clip_grad_norm_ before backward(): nothing is clipped; in all versions
import torch
from torch.nn.utils import clip_grad_norm_


def train_step(model, optimizer, loss_fn, batch):
    model.train()
    optimizer.zero_grad()
    loss = loss_fn(model(batch["x"]), batch["y"])
    clip_grad_norm_(model.parameters(), max_norm=5.0)
    loss.backward()
    optimizer.step()
    return loss.item()
