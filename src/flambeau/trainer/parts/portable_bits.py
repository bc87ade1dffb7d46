"""`portable_bits` where torch is: whether this process holds it, and the operations that it refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.errors import InputError
from flambeau.run.options.portable_bits import OPERATIONS, why_not_held

_INSTEAD = {"sqrt": ", such as 1 / torch.rsqrt(x)"}


def require_portable_bits(threads: int, *, world: int) -> None:
    """Raise InputError if a training in this process would not have the bits of other processors."""
    why = why_not_held(cpu_kernels=torch.backends.cpu.get_cpu_capability(), world=world)
    if why is not None:
        raise InputError(f"portable_bits = {threads} cannot be held here: {why}")


class refused_operations(TorchDispatchMode):  # noqa: N801 (a context manager)
    """Meanwhile an operation whose bits depend on the processor raises InputError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "pow" and args[1:] == (0.5,):
            name = "sqrt"  # as torch computes it
        if name in OPERATIONS:
            raise InputError(
                f"portable_bits: the model uses torch.{name}, whose last bits depend on the maker of the "
                f"processor: use another operation{_INSTEAD.get(name, '')}"
            )
        return func(*args, **(kwargs or {}))
