"""Fine-tune with tiny batches: the BatchNorm layers keep the statistics of the pretraining."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.bn2 = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.out(x.mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        if mode and self.batchnorm_is_frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
                    module.weight.requires_grad_(False)
                    module.bias.requires_grad_(False)
        return self

    batchnorm_is_frozen = False


def batch(num, shift=0.0):
    y = torch.randint(4, (num,))
    x = 0.5 * torch.randn(num, 3, 8, 8) + shift
    x[torch.arange(num), y % 3] += 1.0
    x[y == 3] -= 1.0
    return x, y


def train(model, lr, steps, size, shift, log):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    total = 0.0
    for step in range(steps):
        x, y = batch(size, shift)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 10 == 9:
            if log:
                print(f"step {step} loss {total / 10:.4f}")
            total = 0.0


torch.manual_seed(0)
model = Detector()
train(model, 3e-3, 40, 32, 0.0, log=False)
model.batchnorm_is_frozen = True
model.train()
train(model, 1e-3, 200, 2, 0.5, log=True)
