"""Where torch.compile cannot follow a model in one graph: file, line and reason of each break."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flambeau.errors import InputError
from flambeau.inspection.watched_forward import with_values
from flambeau.trainer.parts.model import kept_as_is
from flambeau.user_code import first_line

_BRANCH = "generic_jump"  # torch's word for an `if` that asks for the value of a tensor


@dataclass(frozen=True)
class GraphBreak:
    """The innermost line outside of torch at which torch.compile ends a graph, and why."""

    file: str
    line: int
    code: str
    reason: str


@dataclass(frozen=True)
class Compilation:
    """torch.compile's result for a forward pass: graphs, all operations, lines that break them."""

    graphs: int
    operations: int
    breaks: tuple[GraphBreak, ...]


def graph_breaks(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Compilation:
    """Trace a forward pass in evaluation mode as torch.compile does, without compiling.

    Modes are restored; tensors on 'meta' get random values unless the model is there too. InputError: it
    cannot be traced, or does not take the arguments.
    """
    inputs: tuple[Any, Any] = (tuple(args), dict(kwargs or {}))
    if not any(one.is_meta for one in (*model.parameters(), *model.buffers())):
        inputs = with_values(inputs)
    try:
        with kept_as_is(model), _quiet(), torch.no_grad():
            explained = torch._dynamo.explain(model.eval())(*inputs[0], **inputs[1])
    except Exception as error:
        raise InputError(
            f"torch.compile cannot follow {type(model).__name__}: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        torch.compiler.reset()
    breaks = [_named(reason) for reason in explained.break_reasons]
    return Compilation(explained.graph_count, explained.op_count, tuple(dict.fromkeys(breaks)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warnings about breaks; what the model prints goes to standard error."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)


def _named(reason: Any) -> GraphBreak:
    frames = list(reason.user_stack)
    torch_folder = str(Path(torch.__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith(torch_folder)]
    frame = (outside or frames)[-1]
    text = reason.reason.partition("\n")[0].strip()
    if text.startswith(_BRANCH):
        text = "a branch that depends on the values of a tensor"
    return GraphBreak(frame.filename, frame.lineno or 0, (frame.line or "").strip(), text)
