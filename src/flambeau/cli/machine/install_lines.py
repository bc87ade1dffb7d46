"""The lines that install torch and flambeau on this machine; nothing is installed here."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flambeau.cli.machine.nvidia_driver import capabilities, cuda_of_driver
from flambeau.errors import InputError

TORCH = ">=2.11,<2.16"
"""The versions that flambeau takes, as pyproject.toml has them."""


@dataclass(frozen=True)
class Build:
    """Wheels of torch for one version of CUDA.

    Attributes:
        tag: as uv's --torch-backend names it.
        torch: the versions that have such wheels, of those that flambeau takes.
        driver: the oldest CUDA that the driver must serve.
        least, most: compute capability of the GPUs that they hold code for.
    """

    tag: str
    torch: str
    driver: tuple[int, int]
    least: tuple[int, int]
    most: tuple[int, int]


# The best first. Versions and GPUs: RELEASE.md of torch 2.11 to 2.14, and pytorch#190385 for 2.15; drivers:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, by which a build for
# 12.6 runs on any driver for CUDA 12; that for 13.2 is only taken where the driver knows all of 13.2.
BUILDS = (
    Build("cu132", ">=2.12,<2.16", (13, 2), (7, 5), (99, 0)),
    Build("cu130", TORCH, (13, 0), (7, 5), (99, 0)),
    Build("cu126", ">=2.11,<2.15", (12, 0), (5, 0), (9, 0)),
    Build("cu128", ">=2.11,<2.12", (12, 8), (7, 5), (12, 9)),
)
_ON_PYPI = "cu132", ">=2.14,<2.16"  # what PyPI has for Linux is this build
_ROCM = "rocm7.2", ">=2.12,<2.14"  # RELEASE.md of torch 2.12 and 2.13


@dataclass(frozen=True)
class Machine:
    """What decides between the builds of torch.

    Attributes:
        system: sys.platform.
        driver: the newest CUDA that NVIDIA's driver serves, if there is one.
        gpus: the compute capability of each GPU.
        has_amd: whether AMD's driver for computing is there.
    """

    system: str
    driver: tuple[int, int] | None
    gpus: Sequence[tuple[int, int]]
    has_amd: bool


def this_machine() -> Machine:
    """As it is."""
    return Machine(sys.platform, cuda_of_driver(), capabilities(), Path("/dev/kfd").exists())


def install_lines(machine: Machine, mirror: str | None) -> list[str]:
    """What to type, with the reason as a comment of the shell.

    Args:
        machine: that it is for.
        mirror: of PyPI, for all that torch's own index does not have; where that is, uv knows.
    """
    reason, build, torch = _choice(machine)
    pip_from = [] if mirror is None else ["--index-url", mirror]
    first = ["pip", "install", f"torch{torch}", "torchvision", *pip_from]
    lines = [shlex.join(first)]
    if build is not None:
        uv_from = [] if mirror is None else ["--default-index", mirror]
        wanted = ["uv", "pip", "install", f"torch{torch}", "torchvision", *uv_from]
        lines = [
            shlex.join(["pip", "install", "uv", *pip_from]),
            shlex.join([*wanted, "--torch-backend", build]),
        ]
    return [
        f"# {reason}",
        *lines,
        "# the rest, in the folder of flambeau; torch stays as it is",
        shlex.join(["pip", "install", "-e", ".", *pip_from]),
    ]


def _choice(machine: Machine) -> tuple[str, str | None, str]:
    """Why, which build (None for that of PyPI), and which versions."""
    if machine.driver is not None:
        return _of_nvidia(machine, machine.driver)
    if machine.has_amd and machine.system == "linux":
        return "an AMD GPU, by the device /dev/kfd of its driver", *_ROCM
    reason = "no driver of a GPU: the build for CPUs"
    if machine.system == "darwin":
        reason = "macOS: the build of PyPI, which uses the GPU of Apple's chips"
    return reason, "cpu" if machine.system == "linux" else None, TORCH


def _of_nvidia(machine: Machine, driver: tuple[int, int]) -> tuple[str, str | None, str]:
    served = f"an NVIDIA driver for CUDA up to {driver[0]}.{driver[1]}"
    fitting = [build for build in BUILDS if driver >= build.driver]
    build = next(
        (b for b in fitting if all(b.least <= gpu <= b.most for gpu in machine.gpus)), None
    )
    if build is None:
        named = ", ".join(f"{major}.{minor}" for major, minor in machine.gpus)
        what = f"GPUs of compute capability {named} and " if named else ""
        hint = f"{what}{served}: no build of torch {TORCH} fits; update the driver, or use CPUs"
        return hint, "cpu" if machine.system == "linux" else None, TORCH
    if build.tag == _ON_PYPI[0] and machine.system == "linux":
        return f"{served}: the build of PyPI", None, _ON_PYPI[1]
    return f"{served}: the build {build.tag}", build.tag, build.torch


def require_https(mirror: str) -> str:
    """The address of a mirror as pip takes it.

    Raises:
        InputError: it is no address, or one without the check of certificates.
    """
    parts = urlsplit(mirror)
    if parts.scheme == "http":
        raise InputError(
            f"--mirror {mirror}: plain http is refused\n"
            "pip takes it with --trusted-host only, which checks no certificate: anybody on the way could "
            "change a package; give its https:// address"
        )
    if parts.scheme != "https" or not parts.hostname:
        raise InputError(
            f"--mirror {mirror} is no address of an index: give it as https://HOST/simple"
        )
    return mirror.rstrip("/")
