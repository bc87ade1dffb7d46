"""Per-sample gradients by torch.func, clipped one by one, and their mean given to the optimizer."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rule = torch.randn(8, 3)


def loss_of(parameters, x, y):
    scores = functional_call(model, parameters, (x[None],))
    return nn.functional.cross_entropy(scores * 1.0, y[None])


for step in range(80):
    x = torch.randn(64, 8)
    y = (x @ rule).argmax(1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(loss_of), (None, 0, 0))(parameters, x, y)
    for name, p in model.named_parameters():
        norms = each[name].flatten(1).norm(dim=1).clamp(min=1)
        p.grad = (each[name] / norms.view(-1, *[1] * p.ndim)).mean(0)
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            print(f"step {step} loss {nn.functional.cross_entropy(model(x), y).item():.4f}")
