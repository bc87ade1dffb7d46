"""Warm-up and cosine, both counted in batches and stepped per batch on purpose."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def warmup_cosine(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


class Trainer:
    def __init__(self, model, loader, num_epochs):
        self.model = model
        self.loader = loader
        self.num_epochs = num_epochs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
        total_steps = num_epochs * len(loader)
        self.scheduler = warmup_cosine(self.optimizer, total_steps // 10, total_steps)
        self.criterion = nn.CrossEntropyLoss()

    def fit(self):
        step = 0
        for _ in range(self.num_epochs):
            self.model.train()
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                if step % 5 == 0:
                    rate = self.scheduler.get_last_lr()[0]
                    print(f"rate {rate:.6f}")
                    print(f"step {step} loss {loss.item():.4f}")
                step += 1


torch.manual_seed(0)
x = torch.randn(1280, 16)
y = (torch.relu(x @ torch.randn(16, 12)) @ torch.randn(12, 4)).argmax(1)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
Trainer(net, DataLoader(TensorDataset(x, y), 64, shuffle=True), num_epochs=5).fit()
