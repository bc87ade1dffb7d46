"""A network with functional dropout; prints the validation loss."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.dropout(x, 0.6)
        return self.fc2(x)


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    loss = F.cross_entropy(model(x), y).item()
    model.train()
    return loss


torch.manual_seed(0)
rule = torch.randn(16, 4)
x_val = torch.randn(500, 16)
y_val = (x_val @ rule).argmax(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    x = torch.randn(64, 16)
    y = (x @ rule).argmax(1)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {evaluate(model, x_val, y_val):.4f}")
