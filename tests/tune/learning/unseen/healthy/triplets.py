"""Triplet margin loss over normalized embeddings of one shared network."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Triplets(Dataset):
    def __init__(self, n, people=20):
        g = torch.Generator().manual_seed(2)
        self.who = torch.randint(people, (n,), generator=g)
        centers = torch.randn(people, 16, generator=g)
        self.x = centers[self.who] + 0.5 * torch.randn(n, 16, generator=g)

    def __len__(self):
        return len(self.who)

    def __getitem__(self, i):
        same = torch.where(self.who == self.who[i])[0]
        other = torch.where(self.who != self.who[i])[0]
        p = same[torch.randint(len(same), ())]
        n = other[torch.randint(len(other), ())]
        return self.x[i], self.x[p], self.x[n]


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)


torch.manual_seed(0)
model = Embedder()
criterion = nn.TripletMarginWithDistanceLoss(
    distance_function=lambda a, b: 1 - (a * b).sum(-1), margin=0.4
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(Triplets(800), batch_size=32, shuffle=True, drop_last=True)
step = 0
for epoch in range(3):
    for anchor, positive, negative in loader:
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
