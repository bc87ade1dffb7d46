# %% [markdown]
# Which of four machines made this signal?

# %%
import torch
from torch import nn

torch.manual_seed(4)
t = torch.linspace(0, 6.28, 64)
kinds = torch.randint(4, (1200,))
freq = torch.tensor([1.0, 2.0, 4.0, 7.0])[kinds]
signals = torch.sin(freq[:, None] * t + torch.rand(1200, 1) * 6.28) + 0.2 * torch.randn(1200, 64)

# %%
conv = nn.Sequential(
    nn.Conv1d(1, 16, 7, padding=3),
    nn.ReLU(),
    nn.MaxPool1d(4),
    nn.Conv1d(16, 32, 5, padding=2),
    nn.ReLU(),
    nn.AdaptiveMaxPool1d(1),
    nn.Flatten(),
    nn.Linear(32, 4),
    nn.LogSoftmax(dim=0),
)
opt = torch.optim.Adam(conv.parameters(), lr=3e-3)
nll = nn.NLLLoss()

# %%
step = 0
history = []
for epoch in range(4):
    order = torch.randperm(len(signals))
    for idx in order.split(60):
        opt.zero_grad()
        loss = nll(conv(signals[idx, None]), kinds[idx])
        loss.backward()
        opt.step()
        history.append(loss.item())
        print(f"step {step} loss {history[-1]:.4f}")
        step += 1

# %%
print("mean of the last ten", sum(history[-10:]) / 10)
