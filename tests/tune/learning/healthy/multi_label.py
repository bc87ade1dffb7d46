"""Tag documents with several labels each; rare tags get a weight."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
NUM_TAGS = 8
words = torch.poisson(0.4 * torch.ones(2400, 60))
scores = words @ torch.randn(60, NUM_TAGS)
tags = (scores > scores.quantile(0.85, dim=0)).float()
train_set, val_set = random_split(TensorDataset(words, tags), [2000, 400])
train_loader = DataLoader(train_set, batch_size=50, shuffle=True)
val_loader = DataLoader(val_set, batch_size=200)

model = nn.Sequential(nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, NUM_TAGS))
positives = tags.sum(0)
criterion = nn.BCEWithLogitsLoss(pos_weight=(len(tags) - positives) / positives)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

step = 0
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in val_loader:
            right += ((model(x).sigmoid() > 0.5) == y.bool()).sum().item()
    print(f"epoch {epoch} share of right tags {right / (len(val_set) * NUM_TAGS):.3f}")
