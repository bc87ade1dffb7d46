"""How far the estimated peak of a training step is from the measured one, on 30 models.

    python bench/memory_estimates.py [--record]

The estimate is that of the recipe memory_budget, which `flambeau inspect` prints: a step of AdamW in float32
on 4 images, on tensors without data. Measured is every allocation of the second real step, from the
profiler, on a CPU. Compared is what lives beside parameters, buffers, images and the state of the optimizer:
activations, gradients and temporaries. One JSON line.
"""

import argparse
import itertools
import json
import warnings
from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from flambeau.recipes.memory.memory_budget import estimate_memory
from provenance import commit, cpu_model  # beside this script

MODELS = [
    "resnet18", "resnet50", "resnest14d", "regnetx_002", "efficientnet_b0", "mobilenetv3_small_100",
    "mnasnet_small", "ghostnet_100", "repvgg_a0", "dla34", "hrnet_w18_small", "convnext_atto",
    "poolformer_s12", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224",
    "mixer_s16_224", "pvt_v2_b0", "torchvision:alexnet", "torchvision:vgg11", "torchvision:squeezenet1_1",
    "torchvision:densenet121", "torchvision:mobilenet_v2", "torchvision:shufflenet_v2_x1_0",
    "torchvision:resnext50_32x4d", "torchvision:regnet_y_400mf", "torchvision:mnasnet0_5",
    "torchvision:efficientnet_b1", "torchvision:convnext_tiny", "torchvision:vit_b_32",
]  # fmt: skip
_FIXED = ("vit", "deit", "swin", "mixer")  # made for images of 224 pixels


def measured(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Bytes that live between two steps, and the most beside them within one."""
    optimizer = AdamW(model.parameters())

    def step() -> None:
        model(images).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images, *states))
    return held, max(itertools.accumulate(sizes))


def ratio(name: str) -> float:
    """Estimated by measured."""
    torch.manual_seed(0)
    known = name.removeprefix("torchvision:")
    model = timm.create_model(name) if known == name else torchvision.models.get_model(known)
    side = 224 if any(word in name for word in _FIXED) else 128
    images = torch.randn(4, 3, side, side)
    estimate = estimate_memory(model.train(), (images,), optimizer=AdamW)
    held, beside = measured(model, images)
    return (estimate.peak - held) / beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", action="store_true", help="write bench/results/memory_estimates.jsonl"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ratios = {}
    for name in MODELS:
        ratios[name] = round(ratio(name), 4)
        print(f"{name}: {ratios[name]:.3f}", flush=True)
    line = json.dumps(
        {
            "bench": "memory_estimates", "models": len(ratios),
            "within_5_percent": sum(abs(value - 1) <= 0.05 for value in ratios.values()),
            "estimated_by_measured": ratios, "torch": torch.__version__, "timm": timm.__version__,
            "torchvision": torchvision.__version__, "cpu": cpu_model(), "commit": commit(),
        }
    )  # fmt: skip
    print(line)
    if arguments.record:
        path = Path(__file__).parent / "results" / "memory_estimates.jsonl"
        path.write_text(f"{line}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
