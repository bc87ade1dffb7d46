"""OneCycle: the rate starts 25 times below its peak and ends near zero, one step per batch."""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
EPOCHS = 4
x = torch.randn(1600, 24)
y = (x @ torch.randn(24, 6)).argmax(1)
train_loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

net = nn.Sequential(
    nn.Linear(24, 96),
    nn.BatchNorm1d(96),
    nn.ReLU(inplace=True),
    nn.Linear(96, 6),
)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
sched = OneCycleLR(opt, max_lr=0.3, epochs=EPOCHS, steps_per_epoch=len(train_loader))
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

step = 0
for epoch in range(EPOCHS):
    net.train()
    for xb, yb in train_loader:
        opt.zero_grad()
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()
        sched.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
