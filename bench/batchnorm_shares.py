"""Does BatchNorm lose accuracy where each rank normalizes by its own share of the batch?

    python bench/batchnorm_shares.py [--seeds N] [--epochs N] [--record]

A small network on the embedded Fashion-MNIST, always with batches of 64, so that the steps and the learning
rate are the same: only the shares that are normalized together differ. One process computes what
DistributedDataParallel does: gradients are the mean over the ranks, running statistics those of rank 0 (a
check at the start compares a step with copies of the model). 64 is SyncBatchNorm. Seeds are paired: each one
has the same initial weights and the same order of images for all shares. `after_update_bn` is the accuracy
with running statistics computed anew over the training images, in batches of 500. One JSON line per share.
"""

import argparse
import copy
import io
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import flambeau.data
from flambeau.recipes.data.recordio import RecordReader, unpack
from flambeau.recipes.models.small_convnet import SmallConvNet
from provenance import commit, cpu_model  # beside this script

BATCH = 64
SHARES = (64, 32, 16, 8, 4, 2)


class ShareNorm(nn.BatchNorm2d):
    """In training each share of the batch by its own statistics; the first alone moves the running ones."""

    share = BATCH

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        first, *others = x.split(self.share)
        shares = [F.batch_norm(one, None, None, self.weight, self.bias, True) for one in others]
        return torch.cat([super().forward(first), *shares])


def network(share: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = SmallConvNet(1, 10, width=16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = ShareNorm
            module.share = share
    return model


def embedded(name: str) -> tuple[Tensor, Tensor]:
    """Images of shape (N, 1, 28, 28), float32 and normalized, and labels."""
    path = Path(flambeau.data.__file__).parent / "embedded" / f"fashion_mnist_{name}.rec"
    with RecordReader(path) as reader:
        records = [unpack(record) for record in reader]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(payload))) for _, payload in records])
    images = torch.from_numpy(pixels)[:, None].float().div(255).sub(0.286).div(0.353)
    return images, torch.tensor([int(header.label) for header, _ in records])


def check() -> None:
    """One step is that of four ranks, each with its own copy of the model and a quarter of the batch."""
    x, y = torch.randn(8, 1, 28, 28), torch.arange(8)
    model = network(2, 0).double()
    ranks = [copy.deepcopy(model) for _ in range(4)]
    F.cross_entropy(model(x.double()), y).backward()
    for rank, images, labels in zip(ranks, x.double().split(2), y.split(2), strict=True):
        F.cross_entropy(rank(images), labels).backward()
    for name, parameter in model.named_parameters():
        gradients = [rank.get_parameter(name).grad for rank in ranks]
        torch.testing.assert_close(parameter.grad, torch.stack(gradients).mean(0))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, ranks[0].get_buffer(name))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = [
        (model(x).argmax(1) == y).sum()
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    ]
    return int(sum(right)) / len(labels)


def train(share: int, seed: int, epochs: int, train_set: tuple[Tensor, Tensor]) -> nn.Module:
    images, labels = train_set
    model = network(share, seed)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        shuffled = torch.randperm(len(images), generator=order)
        for chosen in shuffled[: len(images) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/batchnorm_shares.jsonl"
    )
    arguments = parser.parse_args()
    check()
    train_set, val_set = embedded("train"), embedded("val")
    found: dict[int, list[tuple[float, float]]] = {share: [] for share in SHARES}
    for seed in range(arguments.seeds):
        for share in SHARES:
            model = train(share, seed, arguments.epochs, train_set)
            plain = accuracy(model, *val_set)
            model.train()
            for module in model.modules():
                if isinstance(module, ShareNorm):
                    module.share = 500
            update_bn(train_set[0].split(500), model)
            found[share].append((plain, accuracy(model, *val_set)))
            print(f"seed {seed}, share {share}: {found[share][-1]}", file=sys.stderr)
    lines = []
    for share, pairs in found.items():
        losses = [whole[0] - plain for (plain, _), whole in zip(pairs, found[BATCH], strict=True)]
        line = {
            "images_per_rank": share, "ranks": BATCH // share, "n": len(pairs), "epochs": arguments.epochs,
            "val_accuracy_mean": round(statistics.mean(plain for plain, _ in pairs), 4),
            "val_accuracy": [min(plain for plain, _ in pairs), max(plain for plain, _ in pairs)],
            "less_than_synchronized": [round(loss, 4) for loss in losses],
            "after_update_bn_mean": round(statistics.mean(again for _, again in pairs), 4),
            "torch": torch.__version__, "cpu": cpu_model(), "commit": commit(),
        }  # fmt: skip
        lines.append(json.dumps(line))
    print("\n".join(lines))
    if arguments.record:
        path = Path(__file__).parent / "results" / "batchnorm_shares.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
