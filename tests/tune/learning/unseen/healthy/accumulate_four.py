"""Accumulation over four micro-batches, divided, with the rest of the epoch flushed."""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Accumulator:
    def __init__(self, model, optimizer, every):
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.pending = 0
        self.updates = 0

    def backward(self, loss):
        (loss / self.every).backward()
        self.pending += 1
        if self.pending == self.every:
            self.flush()

    def flush(self):
        if self.pending == 0:
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pending = 0
        self.updates += 1


def amp(enabled):
    if enabled:
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def main():
    torch.manual_seed(0)
    x = torch.randn(1000, 12)
    y = (x[:, :4].sum(1).abs() > 2).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    accumulator = Accumulator(model, optimizer, every=4)
    for epoch in range(4):
        for bx, by in loader:
            with amp(True):
                loss = nn.functional.cross_entropy(model(bx), by)
            accumulator.backward(loss)
            if accumulator.pending == 0:
                print(f"step {accumulator.updates} loss {loss.item():.4f}")
        accumulator.flush()
        print("epoch", epoch)


main()
