"""Where counters of parameters and operations fail: flambeau, torchinfo, torchsummary, fvcore and ptflops.

    pip install torchinfo torchsummary fvcore ptflops
    python bench/model_counters.py [--models N] [--record]

On the 80 classification models of torchvision and 50 of timm. What is right is counted by none of them: the
parameters by adding up each tensor once, the operations by torch.utils.flop_counter around a forward pass on
the device meta. The others count multiply-adds, which are doubled here, and some of them element-wise
operations too, so that only a difference of more than a tenth counts as wrong. One JSON line per contender.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from provenance import commit, cpu_model  # beside this script

LIMIT_S = 180  # per model and contender
Figures = tuple[int, int | None]  # parameters; operations, where they are counted


def flambeau(model: nn.Module, image: Tensor) -> Figures:
    from flambeau.inspection.model_summary import summarize

    whole = summarize(model, (image,)).modules[0]
    return whole.parameters, whole.flops


def torchinfo(model: nn.Module, image: Tensor) -> Figures:
    from torchinfo import summary

    found = summary(model, input_data=image, verbose=0, device=image.device)
    return found.total_params, 2 * found.total_mult_adds


def torchsummary(model: nn.Module, image: Tensor) -> Figures:
    """It counts no operations, and prints what it finds; its input is made on the CPU."""
    from torchsummary import summary

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        summary(model, tuple(image.shape[1:]), device="cpu")
    (line,) = (line for line in said.getvalue().splitlines() if line.startswith("Total params"))
    return int(line.partition(":")[2].replace(",", "")), None


def fvcore(model: nn.Module, image: Tensor) -> Figures:
    from fvcore.nn import FlopCountAnalysis, parameter_count

    analysis = FlopCountAnalysis(model, image).unsupported_ops_warnings(False)
    return parameter_count(model)[""], 2 * int(analysis.uncalled_modules_warnings(False).total())


def ptflops(model: nn.Module, image: Tensor) -> Figures:
    from ptflops import get_model_complexity_info

    macs, parameters = get_model_complexity_info(
        model, tuple(image.shape[1:]), input_constructor=lambda _: image, as_strings=False,
        print_per_layer_stat=False, verbose=False,
    )  # fmt: skip
    return parameters, 2 * macs


CONTENDERS: dict[str, Callable[[nn.Module, Tensor], Figures]] = {
    "flambeau": flambeau, "torchinfo": torchinfo, "torchsummary": torchsummary, "fvcore": fvcore,
    "ptflops": ptflops,
}  # fmt: skip
# The first of each family of timm that takes an image, and no more than one.
FAMILIES = (Path(__file__).parent / "timm_families.txt").read_text().split()


def models() -> list[str]:
    known = torchvision.models.list_models(module=torchvision.models)
    return FAMILIES + [f"torchvision:{name}" for name in known]


def made(name: str, device: str) -> tuple[nn.Module, Tensor]:
    """A model in evaluation mode, and one image for it."""
    known = name.removeprefix("torchvision:")
    # RegNets of torchvision read values while they are made.
    with torch.device("cpu" if known.startswith("regnet_") else device):
        model = timm.create_model(name) if known == name else torchvision.models.get_model(known)
    side = timm.get_pretrained_cfg(name).input_size[-1] if known == name else 224
    return model.eval().to(device), torch.ones(1, 3, side, side, device=device)


def right(name: str) -> tuple[int, int]:
    """Parameters, and operations."""
    model, image = made(name, "meta")
    with FlopCounterMode(display=False) as counter:
        model(image)
    return sum({id(p): p.numel() for p in model.parameters()}.values()), counter.get_total_flops()


def judged(count: Callable[..., Figures], name: str, expected: tuple[int, int], device: str) -> str:
    """'' where both figures are right, else what is not."""
    model, image = made(name, device)
    signal.alarm(LIMIT_S)
    try:
        parameters, operations = count(model, image)
    except Exception as error:
        return f"error: {type(error).__name__}"
    finally:
        signal.alarm(0)
    if parameters != expected[0]:
        return f"parameters: {parameters / expected[0]:.3f} of what there are"
    if operations is not None and abs(operations / expected[1] - 1) > 0.1:
        return f"operations: {operations / expected[1]:.3f} of what there are"
    return ""


def too_long(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, help="the first of the 130 alone")
    parser.add_argument(
        "--record", action="store_true", help="write bench/results/model_counters.jsonl"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, too_long)
    warnings.simplefilter("ignore")
    logging.disable()
    names = models()[: arguments.models]
    wrong: dict[str, dict[str, str]] = {name: {} for name in CONTENDERS}
    for name in names:
        expected = right(name)
        for contender, count in CONTENDERS.items():
            device = "meta" if contender == "flambeau" else "cpu"  # as their pages say
            what = judged(count, name, expected, device)
            if what:
                wrong[contender][name] = what
    lines = []
    for contender, found in wrong.items():
        kinds = [what.partition(":")[0] for what in found.values()]
        line: dict[str, Any] = {
            "bench": "model_counters",
            "contender": contender,
            "version": importlib.metadata.version(contender),
            "models": len(names),
            "right": len(names) - len(found),
            **{kind: kinds.count(kind) for kind in ("error", "parameters", "operations")},
            "wrong": found,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "torchvision": torchvision.__version__,
            "cpu": cpu_model(),
            "commit": commit(),
        }
        lines.append(json.dumps(line))
        print(lines[-1])
    if arguments.record:
        path = Path(__file__).parent / "results" / "model_counters.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
