"""An optimizer written by hand, which makes each update orthogonal by many products of matrices."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "optimizer"
WHERE = None
REMEDY = None
TRAINER = "plain"


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, rounds=6):
        super().__init__(params, {"lr": lr, "momentum": momentum, "rounds": rounds})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                state["buffer"].mul_(group["momentum"]).add_(p.grad)
                update = state["buffer"]
                if p.ndim == 2:
                    update = self.orthogonalized(update, group["rounds"])
                p.add_(update, alpha=-group["lr"])

    def orthogonalized(self, g, rounds):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g / (g.norm() + 1e-7)
        for _ in range(rounds):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    x = torch.randn(20_000, 256)
    y = x[:, :8].argmax(1)
    dl = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(256, 8))
    if told.remedied:
        opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.95)
    else:
        opt = Orthogonal(model.parameters())
    for epoch in range(100):
        for xb, yb in dl:
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    main()
