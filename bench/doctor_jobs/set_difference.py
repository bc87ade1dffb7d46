"""Active learning: what has no label yet is one large set less another, in each step."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import job

CAUSE = "python"
WHERE = "pool = everything - labelled"
REMEDY = None
TRAINER = "plain"


def oracle(x: Tensor) -> Tensor:
    return (x[:, 0] * x[:, 1] > 0).long()


def train_step(net: nn.Module, opt: optim.Optimizer, x: Tensor, y: Tensor) -> float:
    opt.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss.item()


def main() -> None:
    told = job.begin(REMEDY)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(80_000, 16)
    net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 2))
    opt = optim.RMSprop(net.parameters(), lr=1e-3)
    everything = set(range(len(x)))
    labelled = set(random.sample(range(len(x)), 500))
    pool = everything - labelled if told.remedied else set()
    losses: list[float] = []
    while len(labelled) < len(x) // 2 or losses[-1] > 0:
        if not told.remedied:
            pool = everything - labelled
        asked = {pool.pop() for _ in range(min(1, len(pool)))}
        labelled |= asked
        batch = torch.tensor([*asked, *random.choices(range(len(x)), k=63)])
        losses.append(train_step(net, opt, x[batch], oracle(x[batch])))
        if len(losses) % 1000 == 0:
            print(len(labelled), sum(losses[-1000:]) / 1000)


if __name__ == "__main__":
    main()
