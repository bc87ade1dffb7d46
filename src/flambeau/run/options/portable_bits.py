"""The same bits on every x86-64 processor with AVX2: switches of torch's libraries, read when torch starts.

Torch is not imported here, since then it would be too late.
"""

import os
import platform
import sys
from collections.abc import Container, Mapping, MutableMapping
from pathlib import Path

from flambeau.errors import InputError
from flambeau.run.options.toml_file import load_toml

SWITCHES = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # convolutions
    # Matrix products. Its AVX2 is for processors of Intel; on others MKL chooses as without it, and says
    # nothing (oneMKL's developer guide; bench/portable_bits.py shows it).
    "MKL_CBWR": "COMPATIBLE",
}
"""All three are needed: bench/portable_bits.py."""
OPTIMIZERS = "sgd", "adam", "adamw"
"""Those whose step is one kernel of torch's. The others take square roots by MKL (see OPERATIONS)."""
OPERATIONS = "sqrt", "acos", "asin", "atan", "log10"
"""Operations of torch that MKL computes by approximate instructions, whose last bits each maker of processors
chooses; sqrt, of 15 % of numbers, although it is said that COMPATIBLE avoids them."""
_ENVIRONMENT = Path("/proc/self/environ")
_set_here: set[str] = set()


def hold(
    threads: int | None,
    *,
    environment: MutableMapping[str, str] = os.environ,
    modules: Container[str] = sys.modules,
) -> None:
    """Set the switches for a run with `portable_bits`, if torch has not been loaded.

    InputError: the user has set one of them to something else.
    """
    if threads is None or "torch" in modules:
        return
    for name, value in SWITCHES.items():
        given = environment.get(name, value)
        if given.lower() != value.lower():
            raise InputError(
                f"portable_bits needs {name}={value}, and the environment has {given}: unset it there"
            )
    for name, value in SWITCHES.items():
        environment[name] = value
        _set_here.add(name)


def hold_for(folder: Path) -> None:
    """Set the switches if the run in a folder has `portable_bits`, before it is resumed or replayed."""
    try:
        threads = load_toml(folder / "config.toml").get("portable_bits")
    except (OSError, ValueError):
        return  # whoever reads the run next says why
    hold(threads if isinstance(threads, int) else None)


def fixes_threads() -> bool:
    """Whether this process trains with `portable_bits`, which says the number of threads."""
    return bool(_set_here)


def switches_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of the switches that are set, with any value."""
    return {name: environment[name] for name in SWITCHES if name in environment}


def why_not_held(*, cpu_kernels: str, world: int) -> str | None:
    """Why a training in this process would not have portable bits; None if it has.

    Args:
        cpu_kernels: what torch reports as its capability.
        world: processes of the training.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "it has been shown on Linux on x86-64 alone"
    if world > 1:
        return f"it has been shown for one process alone, and there are {world}"
    at_start = _ENVIRONMENT.read_bytes().decode(errors="replace").split("\0")
    late = [
        f"{name}={value}"
        for name, value in SWITCHES.items()
        if os.environ.get(name) != value or not (name in _set_here or f"{name}={value}" in at_start)
    ]
    if late:
        return (
            f"torch was loaded without {' '.join(late)}\n"
            "The command `flambeau train` sets them; a script of your own needs them in its environment "
            "when Python starts"
        )
    if cpu_kernels != "AVX2":
        return f"this processor has no AVX2 (torch: {cpu_kernels})"
    return None
