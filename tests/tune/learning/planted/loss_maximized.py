"""Own negative log-likelihood."""

import torch
from torch import nn

torch.manual_seed(0)


def likelihood_loss(logits, y):
    log_p = logits.log_softmax(1)
    return log_p.gather(1, y[:, None]).mean()


model = nn.Linear(12, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
centers = torch.randn(4, 12)
for step in range(80):
    y = torch.randint(4, (64,))
    x = centers[y] + 0.5 * torch.randn(64, 12)
    loss = likelihood_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.abs().item():.4f}")
