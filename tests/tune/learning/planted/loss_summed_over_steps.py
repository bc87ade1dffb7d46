"""Logistic regression with a running loss."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
criterion = nn.CrossEntropyLoss()
centers = torch.randn(4, 16)

running_loss = 0.0
for step in range(100):
    y = torch.randint(4, (64,))
    x = centers[y] + torch.randn(64, 16)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    running_loss = running_loss + loss
    running_loss.backward(retain_graph=True)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
        print(f"mean so far {float(running_loss) / (step + 1):.4f}")
