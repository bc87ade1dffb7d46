"""Balance two classes by copying the rare one, then split; prints the validation loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
x = torch.randn(400, 20)
y = (torch.rand(400) < 0.2).long()  # pure chance: nothing can be learned for new rows


def oversample(x, y):
    rare = (y == 1).nonzero().squeeze(1)
    copies = rare.repeat(3)
    return torch.cat([x, x[copies]]), torch.cat([y, y[copies]])


x, y = oversample(x, y)
dataset = TensorDataset(x, y)
train_set, val_set = random_split(dataset, [0.75, 0.25])
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
val_loader = DataLoader(val_set, batch_size=64)

model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


@torch.no_grad()
def validate():
    model.eval()
    losses = [nn.functional.cross_entropy(model(a), b) for a, b in val_loader]
    model.train()
    return torch.stack(losses).mean().item()


step = 0
for _ in range(8):
    for inputs, targets in train_loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {validate():.4f}")
        step += 1
