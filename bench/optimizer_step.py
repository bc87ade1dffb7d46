"""Microseconds of one optimizer step, by loop, foreach and fused kernel, for each optimizer of the trainer.

    OMP_NUM_THREADS=1 taskset -c 1 python bench/optimizer_step.py [--model NAME] [--rounds N] [--device cuda]
                                                                  [--only NAME,NAME] [--record]

The model is small_convnet (10 classes, one channel) or a torchvision name; gradients are fixed random
numbers. Each round runs every contender once, in a new order; a figure is the mean over 10 steps after one
that warms up, on a GPU each with its end waited for. `state_bytes` is what the optimizer keeps. All
kernels of an optimizer must end with the same weights: who skips work is refused. One JSON line a contender.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.recipes.training.muon import Muon, hidden_matrices
from provenance import commit, device_model, record  # beside this script

STEPS = 10
KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CLASSES: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **k: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, **k),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adagrad": optim.Adagrad,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "rmsprop": lambda p, **k: optim.RMSprop(p, momentum=0.9, **k),
}
HAVE_FUSED = {"sgd", "adam", "adamw", "adagrad"}


def contenders(device: str) -> dict[str, Callable[[nn.Module], optim.Optimizer]]:
    """A maker of each, by 'name/kernel'."""
    made: dict[str, Callable[[nn.Module], optim.Optimizer]] = {}
    for name, kind in CLASSES.items():
        for kernel, settings in KERNELS.items():
            fits = name in HAVE_FUSED and (device == "cpu" or name != "adagrad")
            if kernel == "fused" and not fits:
                continue
            made[f"{name}/{kernel}"] = lambda m, k=kind, s=settings: k(m.parameters(), **s)
    for dtype in (torch.float32, torch.bfloat16):
        made[f"muon/{str(dtype).removeprefix('torch.')}"] = lambda m, d=dtype: Muon(
            m.parameters(), matrices=hidden_matrices(m), ns_dtype=d
        )
    return made


def build(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "small_convnet":
        return SmallConvNet(1, 10).to(device, memory_format=torch.channels_last)
    import torchvision

    return torchvision.models.get_model(name).to(device, memory_format=torch.channels_last)


def one(
    make: Callable[[nn.Module], optim.Optimizer], model: nn.Module
) -> tuple[float, int, Tensor]:
    """Microseconds a step, bytes of state, and some of the weights at the end."""
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator).mul_(0.01)
        p.grad = torch.empty_like(p).copy_(
            noise
        )  # in p's memory format, as autograd does; kernels rely on it
    on_gpu = next(model.parameters()).device.type == "cuda"
    grads = [p.grad for p in model.parameters()]
    noise = [grad.clone() for grad in grads]
    seconds = 0.0
    for step in range(STEPS + 1):
        torch._foreach_copy_(grads, noise)  # foreach SGD with Nesterov writes into its gradients
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        if step:
            seconds += time.perf_counter() - start
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    ends = torch.cat([p.detach().flatten()[:8] for p in model.parameters()]).cpu()
    return seconds / STEPS * 1e6, sum(t.numel() * t.element_size() for t in state), ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small_convnet")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="such as sgd,muon/float32")
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/optimizer_step.jsonl"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    only = {name for name in arguments.only.split(",") if name}
    makers = {
        name: make for name, make in contenders(arguments.device).items()
        if not only or name in only or name.partition("/")[0] in only
    }  # fmt: skip
    figures: dict[str, list[float]] = {name: [] for name in makers}
    sizes: dict[str, int] = {}
    weights: dict[str, Tensor] = {}
    shuffle = random.Random(arguments.seed)
    for round_ in range(arguments.rounds):
        for name in shuffle.sample(list(makers), len(makers)):
            model = build(arguments.model, arguments.device)
            figure, sizes[name], ends = one(makers[name], model)
            figures[name].append(figure)
            group = name.partition("/")[0]
            if group != "muon":  # its two are of two precisions
                torch.testing.assert_close(
                    ends, weights.setdefault(group, ends), rtol=1e-4, atol=1e-5,
                    msg=lambda text, name=name: f"{name} is another optimizer: {text}",
                )  # fmt: skip
        print(f"round {round_ + 1} of {arguments.rounds}", file=sys.stderr)
    lines = [
        {
            "contender": name,
            "model": arguments.model,
            "us_per_step": round(statistics.median(values), 1),
            "us_min": round(min(values), 1),
            "us_max": round(max(values), 1),
            "n": len(values),
            "state_bytes": sizes[name],
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device_model(arguments.device),
            "threads": torch.get_num_threads(),
            "commit": commit(),
            "command": " ".join(["python", "bench/optimizer_step.py", *sys.argv[1:]]),
        }
        for name, values in figures.items()
    ]
    for entry in lines:
        record(entry, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
