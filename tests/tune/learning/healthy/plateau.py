"""ReduceLROnPlateau, stepped once per epoch with the validation loss; NLLLoss after log_softmax."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, x):
        return torch.log_softmax(self.layers(x), dim=1)


x = torch.randn(1500, 16)
y = (x @ torch.randn(16, 5)).argmax(1)
train_loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=60, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=100)
net = Net()
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

step = 0
for epoch in range(6):
    net.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
    net.eval()
    with torch.no_grad():
        val_loss = sum(criterion(net(a), b).item() for a, b in val_loader) / len(val_loader)
    scheduler.step(val_loss)
    print(f"epoch {epoch} validation {val_loss:.4f} rate {optimizer.param_groups[0]['lr']:.3g}")
