"""Tag made-up documents with several labels each."""

import torch
from torch import nn

torch.manual_seed(0)
NUM_TAGS = 6
weights = torch.randn(30, NUM_TAGS)
docs = torch.randn(2000, 30)
tags = (docs @ weights > 1.0).float()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 64), nn.ReLU())
        self.head = nn.Linear(64, NUM_TAGS)

    def forward(self, x):
        return torch.sigmoid(self.head(self.body(x)))


model = Tagger()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(80):
    pick = torch.randint(2000, (64,))
    loss = criterion(model(docs[pick]), tags[pick])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
