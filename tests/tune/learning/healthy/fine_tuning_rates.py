"""Fine-tune all layers with small rates that fall towards the input."""

import torch
import torch.nn.functional as F
from torch import nn


def make_model():
    return nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(24, 64), nn.GELU()),
            "body": nn.Sequential(nn.Linear(64, 64), nn.GELU()),
            "head": nn.Linear(64, 6),
        }
    )


def forward(model, x):
    return model["head"](model["body"](model["stem"](x)))


def fit(model, optimizer, centers, steps, log):
    for step in range(steps):
        y = torch.randint(6, (64,))
        x = centers[y] + 0.7 * torch.randn(64, 24)
        loss = F.cross_entropy(forward(model, x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if log and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    centers = torch.randn(6, 24)
    model = make_model()
    fit(model, torch.optim.AdamW(model.parameters(), lr=3e-3), centers, 100, log=False)

    # The new domain is the old one, moved a little.
    moved = centers + 0.5 * torch.randn(6, 24)
    model["head"].reset_parameters()
    optimizer = torch.optim.AdamW(
        [
            {"params": model["stem"].parameters(), "lr": 1e-5},
            {"params": model["body"].parameters(), "lr": 5e-5},
            {"params": model["head"].parameters(), "lr": 2e-3},
        ],
        weight_decay=0.01,
    )
    fit(model, optimizer, moved, 120, log=True)


main()
