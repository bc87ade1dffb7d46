"""How near a shuffle by blocks and a window is to a whole one: accuracy, and classes in a batch.

    python bench/shuffle_windows.py [--seeds N] [--epochs N] [--block N] [--streams N] [--mixed] [--record]

The embedded Fashion-MNIST sorted by class, the worst that shards can be, or with --mixed in random order, as
`flambeau pack --shards` leaves images; in 250 blocks of --block neighbours, as many as of photographs of
115 KB are in use at once in a store. For each window, in samples, a small network is trained by `Run` with
`BlockSampler`, on one thread, with the same seeds, in --streams (48 is what stores use); `whole` is the
shuffle without a window. A line has the accuracy on the validation images, mean and standard deviation over
seeds, how many of the ten classes a batch of 64 has on average, and the share of one of 4 ranks in it, over
how many places of an epoch a block is spread, and how many blocks are in use at the same moment, at most.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.batch_plan import BatchPlan
from flambeau.data.sources.open_data import open_sources
from flambeau.images.decode import decode
from flambeau.recipes.data.samplers import BlockSampler, EpochSampler
from provenance import commit, cpu_model, record  # beside this script

BATCH, RANKS = 64, 4
WINDOWS = (1, 64, 256, 1024, 4096)


def data(*, mixed: bool) -> tuple[TensorDataset, TensorDataset]:
    """Training images sorted by class or in random order, and those to validate on."""
    found = []
    for source in open_sources(None):
        order = source.labels.argsort(stable=True)
        if mixed:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(9))
        pixels = [
            torch.from_numpy(decode(source.read(index), channels=1)) for index in order.tolist()
        ]
        images = torch.stack(pixels).permute(0, 3, 1, 2).float() / 255
        found.append(TensorDataset(images, source.labels[order]))
    return found[0], found[1]


def network() -> nn.Module:
    """Three convolutions with batch norm, which feels batches of one class."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def accuracy(
    sampler: EpochSampler, sets: tuple[TensorDataset, TensorDataset], epochs: int, seed: int
) -> float:
    """On the validation images, after a training."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            Path(folder) / "run", model, optimizer, sets[0], duration=f"{epochs}ep", batch_size=BATCH,
            sampler=sampler, schedule="cosine", seed=seed, bar=False,
        )  # fmt: skip
        for _ in run.epochs():
            for images, labels in run.batches():
                run.step(cross_entropy(model(images), labels))
    model.eval()
    images, labels = sets[1].tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def shares(sampler: EpochSampler, rank: int) -> BatchPlan:
    """What one of several ranks reads of an epoch."""
    stream_of = None
    if isinstance(sampler, BlockSampler) and len(sampler.stream_of) > 1:
        stream_of = sampler.stream_of.numpy()
    return BatchPlan(
        BatchLayout(BATCH, rank=rank, world=RANKS),
        lambda epoch: sampler.order(epoch).numpy(),
        repeats=False,
        length=len(sampler),
        epoch=0,
        position=0,
        epochs=1,
        stream_of=stream_of,
    )


def facts(sampler: EpochSampler, labels: torch.Tensor, block: int) -> dict[str, float]:
    """What the order of an epoch is like."""
    order = sampler.order(0)
    count = len(order)
    classes = [len(set(labels[batch].tolist())) for batch in order.split(BATCH)]
    of_rank = [
        len(set(labels[torch.from_numpy(part.indices[part.cut.local])].tolist()))
        for rank in range(RANKS)
        for part in shares(sampler, rank)
    ]
    blocks = order // block
    num = int(blocks.max()) + 1
    places = torch.arange(count)
    first = torch.full((num,), count).scatter_reduce(0, blocks, places, "amin")
    last = torch.zeros(num, dtype=torch.int64).scatter_reduce(0, blocks, places, "amax")
    in_use = [int(((first <= at) & (last >= at)).sum()) for at in range(0, count, BATCH)]
    return {
        "classes_in_a_batch": round(statistics.fmean(classes), 2),
        "classes_in_a_share": round(statistics.fmean(of_rank), 2),
        "places_of_a_block": round(float((last - first).double().median())),
        "blocks_in_use": max(in_use),
        "blocks": num,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--block", type=int, default=24)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--mixed", action="store_true", help="images in random order, not by class")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    torch.set_num_threads(1)
    sets = data(mixed=told.mixed)
    labels = sets[0].tensors[1]
    count = len(labels)
    lengths = [told.block] * (count // told.block)
    lengths += [count % told.block] if count % told.block else []
    found: dict[str, list[float]] = {}
    for seed in range(told.seeds):
        samplers: dict[str, EpochSampler] = {"whole": EpochSampler(count, seed=seed)}
        samplers |= {
            f"{one}": BlockSampler(lengths, window=one, streams=told.streams, seed=seed)
            for one in WINDOWS
        }
        for name, sampler in samplers.items():
            found.setdefault(name, []).append(accuracy(sampler, sets, told.epochs, seed))
    for name, sampler in samplers.items():
        line = {
            "window": name,
            "shards": "mixed" if told.mixed else "sorted by class",
            "accuracy": round(statistics.fmean(found[name]), 4),
            "deviation": round(statistics.stdev(found[name]) if told.seeds > 1 else 0.0, 4),
            **facts(sampler, labels, told.block),
            "images": count,
            "block": told.block,
            "streams": told.streams,
            "seeds": told.seeds,
            "epochs": told.epochs,
            "torch": torch.__version__,
            "cpu": cpu_model(),
            "commit": commit(),
        }
        record(line, __file__, keep=told.record)


if __name__ == "__main__":
    main()
