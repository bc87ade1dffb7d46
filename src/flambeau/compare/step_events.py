"""The tensors of a training step in order, and the first that differs between two runs.

Outputs of modules are copied when they are made, as the next module may overwrite them. If the copies take
too much memory, a digest of the bits is kept, which shows whether two are equal, not by how much.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flambeau.compare.tensor_difference import TensorDifference, tensor_difference

Phase = Literal[
    "start",
    "length",
    "order",
    "label",
    "size",
    "pixels",
    "input",
    "forward",
    "loss",
    "backward",
    "gradient",
    "update",
    "statistics",
    "average",
    "state",
]

_MAX_BYTES = 2**30  # of copies in a step of one run; chosen


@dataclass(frozen=True)
class Event:
    """A tensor of a step.

    Attributes:
        phase: 'input' of the model, 'forward', 'loss', 'backward' (gradient of an output) or 'gradient' (of a
            parameter).
        value: a copy on the CPU, or the digest of its bits.
    """

    phase: Phase
    name: str
    kind: str
    value: Tensor | bytes


@dataclass(frozen=True)
class FirstDifference:
    """What differs first in a step of two runs; `name` is '' if it has none."""

    phase: Phase
    text: str
    name: str = ""


class StepEvents:
    """Records the `events` of the current step of a model.

    Not outputs of `modules` in a compiled model, which calls no hooks.
    """

    def __init__(self, model: nn.Module, *, modules: bool) -> None:
        self.events: list[Event] = []
        self._copied = 0
        self._is_forward = False
        self._handles: list[Any] = []
        self._watch_gradients(model)
        if modules:
            self._watch_modules(model)

    def start(self) -> None:
        self.events.clear()
        self._copied = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass, so that recomputation in the backward pass does not count."""
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False

    def add(self, phase: Phase, name: str, kind: str, tensor: Tensor) -> None:
        copy = tensor.detach().to("cpu", copy=True)
        self._copied += copy.nbytes
        value: Tensor | bytes = copy
        if self._copied > _MAX_BYTES:
            self._copied -= copy.nbytes
            words = copy.contiguous().view(-1).view(torch.uint8) if copy.numel() else copy
            value = hashlib.sha256(words.numpy().tobytes()).digest()
        self.events.append(Event(phase, name, kind, value))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_modules(self, model: nn.Module) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            if self._is_forward:
                for tensor in _tensors(inputs):
                    self.add("input", "", type(module).__name__, tensor)

        self._handles.append(model.register_forward_pre_hook(before))
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._is_forward:
                return
            kind = type(module).__name__
            for tensor in _tensors(output):
                self.add("forward", name, kind, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda gradient: self.add("backward", name, kind, gradient)
                    )

        return after

    def _watch_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda p, name=name: self.add("gradient", name, "", p.grad)
                    )
                )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def first_event(left: Sequence[Event], right: Sequence[Event]) -> FirstDifference | None:
    """The first event that differs; all before it are equal to the bit."""
    for a, b in itertools.zip_longest(left, right):
        if a is None or b is None or (a.phase, a.name) != (b.phase, b.name):
            names = ["nothing more" if event is None else _what(event) for event in (a, b)]
            one = b if a is None else a
            return FirstDifference(
                one.phase, f"the models differ: {names[0]} there, {names[1]} here", one.name
            )
        text = _difference(a, b)
        if text is not None:
            return FirstDifference(a.phase, f"{_what(a)}{_given(a)}: {text}", a.name)
    return None


def _difference(left: Event, right: Event) -> str | None:
    a = left.value
    b = right.value
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if left.phase == "loss" and a.numel() == b.numel() == 1 and float(a) != float(b):
            return f"{float(a)!r} and {float(b)!r}"
        difference = tensor_difference("", a, b)
        return None if difference is None else str(difference).removeprefix(": ")
    return None if isinstance(a, bytes) and a == b else "its bits differ"


def _what(event: Event) -> str:
    of = f"'{event.name}' ({event.kind})" if event.name else f"the model ({event.kind})"
    return {
        "input": "the input of the model",
        "forward": f"the output of {of}",
        "loss": "the loss",
        "backward": f"the gradient of the output of {of}",
        "gradient": f"the gradient of parameter '{event.name}'",
    }.get(event.phase, event.name)


def _given(event: Event) -> str:
    """What was equal before, so that the difference begins here."""
    return {
        "input": ", made of equal images",
        "forward": ", given equal inputs",
        "loss": ", of equal outputs",
        "backward": ", after an equal forward pass",
        "gradient": ", after an equal forward pass",
    }.get(event.phase, "")


def batch_difference(
    names: tuple[Sequence[str], Sequence[str]],
    images: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    classes: tuple[Sequence[str], Sequence[str]],
) -> FirstDifference | None:
    """How two batches differ: in length, samples, pixels, or targets (labels, rows or masks)."""
    lengths = len(images[0]), len(images[1])
    if lengths[0] != lengths[1]:
        return FirstDifference("length", f"the batch has {lengths[0]} and {lengths[1]} samples")
    for number, (a, b) in enumerate(zip(*names, strict=True)):
        if a != b:
            return FirstDifference(
                "order", f"sample {number} of the batch is {a} in one and {b} in the other"
            )
    if targets[0].ndim > 1:  # rows of labels or numbers, or masks
        return _target_difference(names[0], targets) or _pixel_difference(names[0], images)
    for number, (a, b) in enumerate(zip(targets[0].tolist(), targets[1].tolist(), strict=True)):
        labels = classes[0][a], classes[1][b]
        if a != b or labels[0] != labels[1]:
            numbers = "" if labels[0] != labels[1] else f" (class {a} and {b})"
            text = f"the label of {names[0][number]}: {labels[0]} and {labels[1]}{numbers}"
            return FirstDifference("label", text, names[0][number])
    return _pixel_difference(names[0], images)


def _target_difference(
    names: Sequence[str], targets: tuple[Tensor, Tensor]
) -> FirstDifference | None:
    """How rows of targets, or masks, differ."""
    if targets[0].shape != targets[1].shape:
        sides = [" x ".join(map(str, one.shape[1:])) for one in targets]
        return FirstDifference("label", f"the targets of the batch are {sides[0]} and {sides[1]}")
    one, other = (target.float().flatten(1).nan_to_num(-1.5e38) for target in targets)
    differs = one != other
    rows = differs.any(1).nonzero().flatten().tolist()
    if not rows:
        return None
    name = names[rows[0]]
    count = int(differs[rows[0]].sum())
    text = f"the target of {name}: {count} of {differs.shape[1]} values differ"
    return FirstDifference("label", text, name)


def _pixel_difference(
    names: Sequence[str], images: tuple[Tensor, Tensor]
) -> FirstDifference | None:
    if images[0].shape != images[1].shape:
        sides = [" x ".join(map(str, image.shape[1:])) for image in images]
        return FirstDifference("size", f"the images of the batch are {sides[0]} and {sides[1]}")
    whole = tensor_difference("", *images)
    if whole is None:
        return None
    rows = (images[0] != images[1]).flatten(1).any(1).nonzero().flatten().tolist() or [0]
    one = tensor_difference("", images[0][rows[0]], images[1][rows[0]]) or whole
    more = f", and those of {len(rows) - 1} more" if len(rows) > 1 else ""
    what = f"{one.num_different} of {one.num_elements} pixel values"
    where = names[rows[0]]
    return FirstDifference("pixels", f"{what} of {where}, as the model is to see it{more}", where)


def tensor_phase(tensor: TensorDifference, *, buffers: frozenset[str]) -> Phase:
    """The part of a step that changes a tensor of the state."""
    if tensor.name.startswith("average of "):
        return "average"
    return "statistics" if tensor.name in buffers else "update"
