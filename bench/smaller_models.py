"""Milliseconds, parameters and operations of a network as it is, folded, and with fewer channels.

    python bench/smaller_models.py [--model NAME] [--batch N] [--size PIXELS] [--rounds N] [--record]

One thread of a CPU, float32, in eval mode; the contenders take turns, and `ms` is the median CPU time of a
forward pass over the rounds, after one that does not count. A model of torchvision with random weights:
accuracy is not measured here. One JSON line per contender.
"""

import argparse
import statistics
import time

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm
from flambeau.recipes.compress.prune_channels import prune_channels
from provenance import commit, cpu_model, record  # beside this script


def times(models: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, model in models.items():
                start = time.process_time()
                model(x)
                taken[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    at = commit()
    x = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    plain = torchvision.models.get_model(arguments.model, weights=None).eval()
    models = {"plain": plain, "folded": fold_batchnorm(plain, x[:1]).model}
    for amount in (0.3, 0.5):
        models[f"pruned-{amount}"] = prune_channels(plain, x[:1], amount=amount).model
    models["pruned-0.5-folded"] = fold_batchnorm(models["pruned-0.5"], x[:1]).model
    milliseconds = times(models, x, arguments.rounds)
    for name, model in models.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(x)
        line = {
            "contender": name, "model": arguments.model, "batch": arguments.batch, "size": arguments.size,
            "ms": round(milliseconds[name], 1), "ratio": round(milliseconds[name] / milliseconds["plain"], 2),
            "parameters": sum(p.numel() for p in model.parameters()), "flops": counter.get_total_flops(),
            "rounds": arguments.rounds, "threads": 1, "torch": torch.__version__, "cpu": cpu_model(),
            "commit": at,
        }  # fmt: skip
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
