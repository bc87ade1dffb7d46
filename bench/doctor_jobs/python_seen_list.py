"""A notebook that became a script: it keeps what it has seen in a list, and looks each sample up there."""

# %%
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "fresh = sum(key not in seen for key in keys)"
REMEDY = None
TRAINER = "plain"

# %%
told = job.begin(REMEDY)
torch.set_num_threads(1)
N = 20000
X = torch.randn(N, 50)
ids = torch.randperm(10 * N)[:N]
y = (X.sum(1) > 0).long()
dl = DataLoader(TensorDataset(X, y, ids), batch_size=64, shuffle=True)

# %%
net = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
seen = set(ids[:4000].tolist()) if told.remedied else ids[:4000].tolist()
history = []

# %%
for _epoch in range(1000):
    for xb, yb, ib in dl:
        keys = ib.tolist()
        fresh = sum(key not in seen for key in keys)
        opt.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        opt.step()
        history.append((fresh, loss.detach()))

# %%
print(history[-1])
