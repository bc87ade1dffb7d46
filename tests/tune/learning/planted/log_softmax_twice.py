"""Classify by log-probabilities."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centers = torch.randn(6, 24)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(24, 48)
        self.fc2 = nn.Linear(48, 6)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for step in range(80):
    y = torch.randint(6, (64,))
    x = centers[y] + 0.8 * torch.randn(64, 24)
    log_probabilities = model(x)
    loss = criterion(log_probabilities, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
