"""What channels, groups, branches and element-wise operations cost on this machine, at equal operations.

Source: the four guidelines of Ma et al., "ShuffleNet V2", ECCV 2018, arXiv 1807.11164, section 3, and the
channels of their tables 1 to 4; they measured inference on other machines.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flambeau.inspection.timing.paired_times import PartTime, interleaved, ratios, summary

_SIDE = 56  # pixels, as in the paper
_BLOCKS = 3  # one after the other; the paper has ten
_BATCH = {"cpu": 1}
_GPU_BATCH = 32


@dataclass(frozen=True)
class Variant:
    """One way to spend about the same operations.

    Attributes:
        rule: which of the four.
        name: what it is.
        flops: of its convolutions in a forward pass, a multiply and an add being two.
        inference: its forward pass.
        training: its forward and backward pass.
        times_inference: of the first of its rule, whose operations are about as many, round by round.
        times_training: likewise.
    """

    rule: str
    name: str
    flops: int
    inference: PartTime
    training: PartTime
    times_inference: float
    times_training: float


class _Branches(nn.Module):
    """Convolutions beside each other, added."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_point(channels, channels) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total


class _Bottleneck(nn.Module):
    """As in a ResNet, with or without ReLU and the addition."""

    def __init__(self, channels: int, *, relu: bool, shortcut: bool) -> None:
        super().__init__()
        narrow = channels // 4
        self.convolutions = nn.ModuleList(
            [
                _point(channels, narrow),
                nn.Conv2d(narrow, narrow, 3, padding=1, bias=False),
                _point(narrow, channels),
            ]
        )
        self.relu, self.shortcut = relu, shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for convolution in self.convolutions:
            out = convolution(out)
            if self.relu:
                out = out.relu()
        return out + x if self.shortcut else out


def _point(before: int, after: int, *, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 1, groups=groups, bias=False)


def _variants() -> dict[tuple[str, str], tuple[int, nn.Module]]:
    """By rule and name the channels of the input, and the network."""
    found: dict[tuple[str, str], tuple[int, nn.Module]] = {}

    def add(rule: str, name: str, channels: int, *layers: nn.Module) -> None:
        blocks = [copy.deepcopy(layer) for _ in range(_BLOCKS) for layer in layers]
        found[rule, name] = channels, nn.Sequential(*blocks)

    for narrow, wide in ((128, 128), (90, 180), (52, 312), (36, 432)):
        name = f"{narrow} to {wide} and back (1:{round(wide / narrow)})"
        add("channels in and out", name, narrow, _point(narrow, wide), _point(wide, narrow))
    for channels, groups in ((128, 1), (180, 2), (256, 4), (360, 8)):
        layers = [_point(channels, channels, groups=groups)] * 2
        add("groups", f"{groups} of {channels} channels", channels, *layers)
    add("branches", "1 convolution of 128 channels", 128, _point(128, 128))
    for channels, count in ((90, 2), (64, 4)):
        name = f"{count} of {channels}"
        add("branches", f"{name} in a row", channels, *[_point(channels, channels)] * count)
        add("branches", f"{name} side by side", channels, _Branches(channels, count))
    for name, relu, shortcut in (
        ("neither", False, False),
        ("ReLU", True, False),
        ("addition", False, True),
        ("both", True, True),
    ):
        block = _Bottleneck(256, relu=relu, shortcut=shortcut)
        add("element-wise operations", f"bottleneck of 256 channels: {name}", 256, block)
    return found


@torch.inference_mode()
def _inference(network: nn.Module, x: Tensor) -> None:
    network(x)


def _training(network: nn.Module, x: Tensor) -> None:
    network(x).sum().backward()


def measure_rules(
    device: torch.device, *, rounds: int = 15, enough_s: float = 60.0, side: int = _SIDE
) -> tuple[Variant, ...]:
    """Measure all variants in turn; the first of each rule is what the rule recommends.

    Args:
        device: to run on.
        rounds: as of `interleaved`.
        enough_s: likewise.
        side: of the images, pixels.
    """
    batch = _BATCH.get(device.type, _GPU_BATCH)
    calls: dict[str, Callable[[], object]] = {}
    flops: dict[tuple[str, str], int] = {}
    for key, (channels, network) in _variants().items():
        network.to(device)
        x = torch.randn(batch, channels, side, side, device=device)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(x)
        flops[key] = counter.get_total_flops()
        calls[f"inference {key}"] = partial(_inference, network, x)
        calls[f"training {key}"] = partial(_training, network, x)
    seconds = interleaved(calls, device=device, rounds=rounds, enough_s=enough_s)
    first: dict[str, tuple[list[float], list[float]]] = {}
    found = []
    for key, count in flops.items():
        both = seconds[f"inference {key}"], seconds[f"training {key}"]
        base = first.setdefault(key[0], both)
        inference, training = (summary(key[1], one) for one in both)
        against = [ratios(one, of).median_s for one, of in zip(both, base, strict=True)]
        found.append(Variant(*key, count, inference, training, *against))
    return tuple(found)
