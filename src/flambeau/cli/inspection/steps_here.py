"""Training steps on this machine, for the options of `flambeau inspect` that measure."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.errors import InputError, WorkerLost
from flambeau.terminal import say
from flambeau.user_code import first_line

if TYPE_CHECKING:
    from torch import nn

    from flambeau.inspection.timing.training_steps import Steps

BATCH = 8  # images of a step where neither the input nor a run says; chosen


@dataclass(frozen=True)
class Source:
    """What trains: a run on its data, or a model on random numbers."""

    run: Path | None = None
    trust: bool = False
    model: "nn.Module | None" = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def quiet_profiler() -> None:
    """What torch's profiler and allocator tell on standard error: they read this when they are loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextlib.contextmanager
def steps_here(source: Source) -> "Iterator[Steps]":
    """On the accelerator, if there is one.

    Raises:
        InputError: a step fails, or the data of a run are not there any more.
        WorkerLost: a process that reads data has died.
    """
    from flambeau.inspection.timing.training_steps import steps_of_model, steps_of_run
    from flambeau.trainer.parts.device import pick_device, use_threads

    with contextlib.ExitStack() as stack:
        if source.run is not None:
            steps = stack.enter_context(steps_of_run(source.run, trust=source.trust, say=say))
        else:
            assert source.model is not None
            use_threads()
            device = pick_device("auto")
            steps = steps_of_model(source.model, source.args, source.kwargs, device=device)
        try:
            yield steps
        except (InputError, WorkerLost):
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"a training step fails: {type(error).__name__}: {first_line(error)}"
            ) from error
