"""A logger writes a line for each parameter in each step to a file, since its level is still DEBUG."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = 'logger.debug("step %d: %s has shape %s, lr %g", step, name, tuple(p.shape), lr)'
REMEDY = None
TRAINER = "plain"

logger = logging.getLogger("train")


def setup_logging(level):
    handler = logging.FileHandler(job.made(job.CACHE) / "train.log", mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class ResidualMLP(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth)
        )
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def train_step(model, optimizer, batch, step):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    lr = optimizer.param_groups[0]["lr"]
    for name, p in model.named_parameters():
        logger.debug("step %d: %s has shape %s, lr %g", step, name, tuple(p.shape), lr)
    optimizer.step()
    return loss


def main():
    told = job.begin(REMEDY)
    setup_logging(logging.INFO if told.remedied else logging.DEBUG)
    torch.set_num_threads(1)
    model = ResidualMLP(32, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    data = TensorDataset(torch.randn(4096, 32), torch.randint(0, 2, (4096,)))
    step = 0
    for _ in range(100):
        for batch in DataLoader(data, batch_size=16, shuffle=True, drop_last=True):
            loss = train_step(model, optimizer, batch, step)
            step += 1
            if step % 100 == 0:
                logger.info("step %d: loss %.4f", step, loss.item())


if __name__ == "__main__":
    main()
