"""Milliseconds and error of pairwise distances: ours against torch.cdist with and without matrix products.

    python bench/pairwise_distances.py [--rows M] [--dimensions D] [--rounds N] [--device cpu] [--record]

`forward_ms` and `backward_ms` (the gradient of both sides) are medians over the rounds, after one that does
not count; on a CPU they are CPU time of one thread. `peak_mb` (GPUs alone) is the most memory of both passes
beyond the inputs. The errors are the largest, of float32 against float64 without products, relative to the
distance, for points of N(0, 1) (`error`) and for 1000 + 0.01 N(0, 1) (`error_far`). One JSON line per
contender.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flambeau.recipes.tensors.pairwise_distances import pairwise_distances
from provenance import commit, device_model, record  # beside this script

Distances = Callable[[Tensor, Tensor], Tensor]


def without_products(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


CONTENDERS: dict[str, Distances] = {
    "ours": pairwise_distances,
    "cdist-without-products": without_products,
    "cdist-default": torch.cdist,
}


def seconds(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def times(call: Distances, a: Tensor, b: Tensor, rounds: int) -> dict[str, float]:
    device, taken = str(a.device), []
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    for _ in range(rounds + 1):
        start = seconds(device)
        total = call(a, b).sum()
        middle = seconds(device)
        torch.autograd.grad(total, (a, b))
        taken.append((1000 * (middle - start), 1000 * (seconds(device) - middle)))
    forward, backward = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    line = {"forward_ms": round(forward, 1), "backward_ms": round(backward, 1)}
    if device != "cpu":
        line["peak_mb"] = round((torch.cuda.max_memory_allocated(device) - before) / 1e6)
    return line


def error(call: Distances, a: Tensor, b: Tensor) -> float:
    exact = without_products(a.double(), b.double())
    return float(f"{((call(a, b) - exact).abs() / exact).max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--dimensions", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    at = commit()
    shape = (arguments.rows, arguments.dimensions)
    a, b = (torch.randn(shape, device=arguments.device, requires_grad=True) for _ in range(2))
    for name, call in CONTENDERS.items():
        line = {
            "contender": name,
            **times(call, a, b, arguments.rounds),
            "error": error(call, a.detach(), b.detach()),
            "error_far": error(call, 1000 + 0.01 * a.detach(), 1000 + 0.01 * b.detach()),
            "rows": arguments.rows, "dimensions": arguments.dimensions, "n": arguments.rounds,
            "torch": torch.__version__, "device": device_model(arguments.device), "commit": at,
        }  # fmt: skip
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
