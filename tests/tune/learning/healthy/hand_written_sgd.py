"""A loop with an update of its own for one part, by add_ under no_grad, and log-probabilities by hand."""

import torch
from torch import nn

torch.manual_seed(0)
rule = torch.randn(8, 5)
model = nn.Linear(8, 5)
scale = torch.ones((), requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, nesterov=True, momentum=0.8)
for step in range(80):
    x = torch.randn(96, 8)
    log_probabilities = (scale * model(x)).log_softmax(-1)
    loss = -log_probabilities.gather(1, (x @ rule).argmax(1, keepdim=True)).mean()
    optimizer.zero_grad()
    scale.grad = None
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        scale.add_(scale.grad, alpha=-1e-2)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
