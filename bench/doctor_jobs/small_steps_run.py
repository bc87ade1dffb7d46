"""Batches of 4 through 60 narrow layers: what Python and torch cost per operation. flambeau's Run."""

import shutil

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import job
from flambeau import Run

CAUSE = "small steps"
WHERE = None
REMEDY = "compile"
TRAINER = "flambeau Run"


def main() -> None:
    told = job.begin(REMEDY, batches=(Run, "batches"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(60)]
    model = nn.Sequential(*layers, nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    data = TensorDataset(torch.randn(20_000, 16), torch.randint(0, 10, (20_000,)))
    out = job.CACHE / "flambeau-run"
    shutil.rmtree(out, ignore_errors=True)
    trained = torch.compile(model) if told.remedied else model
    run = Run(out, trained, optimizer, data, duration="100ep", batch_size=4)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(trained(x), y))


if __name__ == "__main__":
    main()
