"""Most of the target is noise of variance 1, so the loss can fall by a small part only."""

import torch
from torch import nn

torch.manual_seed(0)
x_train = torch.randn(8192, 10)
weight = 0.15 * torch.randn(10)
y_train = x_train @ weight + torch.randn(8192)
x_val = torch.randn(4096, 10)
y_val = x_val @ weight + torch.randn(4096)

model = nn.Linear(10, 1)
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
criterion = nn.MSELoss()


def validate():
    model.eval()
    with torch.no_grad():
        loss = criterion(model(x_val).squeeze(1), y_val)
    model.train()
    return loss.item()


for step in range(120):
    pick = torch.randint(8192, (256,))
    loss = criterion(model(x_train[pick]).squeeze(1), y_train[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {validate():.4f}")
