"""Train and validate by turns."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x_train = torch.randn(128, 16)
x_val = torch.randn(256, 16)
rule = torch.randn(16, 4)
y_train = (x_train @ rule).argmax(1)
y_val = (x_val @ rule).argmax(1)


@torch.no_grad()
def validate():
    model.eval()
    return nn.functional.cross_entropy(model(x_val), y_val).item()


model.train()
for step in range(300):
    pick = torch.randint(128, (32,))
    loss = nn.functional.cross_entropy(model(x_train[pick]), y_train[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {validate():.4f}")
