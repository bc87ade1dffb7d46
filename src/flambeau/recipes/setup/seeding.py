"""Seed every random generator of a process, and save and restore their states to the bit.

为进程中的所有随机数生成器设定种子，并逐位保存与恢复它们的状态。

Source: original; the generators are those of torch, of Python's `random` and of `numpy.random` (legacy,
global).

PYTHONHASHSEED is deliberately not set: Python reads it once, before the first line of a program runs, so
setting it later changes nothing in this process. If the order of a set of strings matters, sort the set, or
start the program with `PYTHONHASHSEED=0 python ...`.

Not for generators that you make (`torch.Generator`, `numpy.random.default_rng`, `random.Random`), each of
which has a state to save, nor for the workers of a DataLoader, which have generators in their processes.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

_KEYS = frozenset({"torch", "cuda", "python", "numpy"})


def seed_everything(seed: int) -> None:
    """Seed torch on every device, Python's `random`, and NumPy if it is installed.

    Args:
        seed: in [0, 2**64); torch's CPU generator uses the low 32 bits.

    Raises:
        ValueError: outside that range.
        TypeError: no integer.

    Example:
        >>> seed_everything(7)
        >>> first = torch.rand(3)
        >>> seed_everything(7)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    torch.manual_seed(seed)  # CUDA too, even if it is not initialized yet
    random.seed(seed)
    try:
        import numpy as np
    except ImportError:
        return
    # NumPy takes 32 bits at a time. Below 2**32 this is the stream of np.random.seed(seed).
    np.random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])


def rng_state() -> dict[str, Any]:
    """The states of all global generators, for `torch.load(weights_only=True)`.

    Returns:
        CPU tensors. `torch`: uint8; `cuda`: uint8 per visible device, empty if CUDA is not initialized;
        `python`: [version, int64 tensor, cached gaussian or None]; `numpy`: similar, or None without NumPy.

    Raises:
        RuntimeError: NumPy's global generator is not MT19937.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(3)
        >>> set_rng_state(state)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, torch.tensor(words, device="cpu"), gauss],
        "numpy": _numpy_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states of `rng_state`.

    A generator that is not in the state (CUDA not initialized or no NumPy then) is not changed.

    Raises:
        ValueError: no such dict, or with more CUDA devices than are visible.
        ImportError: it has NumPy's state, but NumPy is not installed.

    Example:
        >>> before = rng_state()
        >>> _ = random.gauss(), torch.randn(1)
        >>> set_rng_state(before)
    """
    if state.keys() != _KEYS:
        raise ValueError(
            f"an RNG state has the keys {sorted(_KEYS)}, got {sorted(map(str, state))}: "
            "pass what rng_state() returned"
        )
    if len(state["cuda"]) > torch.cuda.device_count():
        raise ValueError(
            f"the state holds {len(state['cuda'])} CUDA generators, but {torch.cuda.device_count()} "
            "CUDA devices are visible here: shorten state['cuda'] to leave the others out"
        )
    if state["numpy"] is not None:
        _set_numpy_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, cuda_state in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(cuda_state, index)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def _numpy_state() -> list[Any] | None:
    try:
        import numpy as np
    except ImportError:
        return None
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise RuntimeError(
            f"NumPy's global generator is {state['bit_generator']}, only MT19937 can be saved: "
            "drop the call of numpy.random.set_bit_generator"
        )
    words = torch.tensor(state["state"]["key"].tolist(), device="cpu")
    return ["MT19937", words, state["state"]["pos"], state["has_gauss"], state["gauss"]]


def _set_numpy_state(state: list[Any]) -> None:
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError(
            "the state holds NumPy's generator: pip install numpy, or set state['numpy'] to None"
        ) from error
    name, words, position, has_gauss, gauss = state
    np.random.set_state((name, words.tolist(), position, has_gauss, gauss))


def seed_cpu(seed: int) -> None:
    """Seed the global generators that data loading uses, cheaply enough for every sample.

    Args:
        seed: any integer. torch (CPU) and `random` use its low 64 bits, NumPy the low 32.

    Example:
        >>> seed_cpu(-1)
        >>> first = torch.rand(3)
        >>> seed_cpu(-1)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    torch.default_generator.manual_seed(seed & 0xFFFFFFFFFFFFFFFF)
    random.seed(seed & 0xFFFFFFFFFFFFFFFF)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def cpu_generators_restored() -> Iterator[None]:
    """Restore the generators that `seed_cpu` seeds at the end of the `with` block.

    Example:
        >>> before = torch.get_rng_state()
        >>> with cpu_generators_restored():
        ...     seed_cpu(3)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    states = random.getstate(), torch.default_generator.get_state()
    numpy_state = _raw_numpy_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])
        if numpy_state is not None:
            numpy_state[0](numpy_state[1])


def _raw_numpy_state() -> tuple[Any, Any] | None:
    """NumPy's function that sets a state, and the state of any generator; None without NumPy."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np.random.set_state, np.random.get_state()
