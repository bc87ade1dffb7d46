"""`flambeau env`: what a run would use here, to read or to paste into a bug report."""

import argparse
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flambeau.cli.table import print_json
from flambeau.errors import InputError
from flambeau.terminal import print_text
from flambeau.version import __version__

if TYPE_CHECKING:
    from flambeau.inspection.operation_check import Difference

_DEVELOPMENT_EXTRAS = {"dev", "docs", "bench"}
# uv chooses by the driver; run in the folder of flambeau, it keeps the versions of torch given there.
_INSTALL = (
    "uv pip install -e . --torch-backend auto "
    "--reinstall-package torch --reinstall-package torchvision"
)

HELP = "report versions, devices and usable CPUs, and what does not fit together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object, for programs")
    add(
        "--disk",
        nargs="?",
        const=".",
        metavar="FOLDER",
        help="measure how fast a folder is written and read, some six seconds (default: this one)",
    )
    add(
        "--selftest",
        action="store_true",
        help="compare operations and a training on each device with float64 on the CPU, some seconds",
    )


def run(arguments: argparse.Namespace) -> int:
    report = _report(None if arguments.disk is None else Path(arguments.disk))
    if arguments.selftest:
        report["selftest"] = _selftest()
    if arguments.json:
        print_json([report])
    else:
        rows = list(_rows(report))
        width = max(len(label) for label, _ in rows)
        print_text("\n".join(f"{label:{width}}  {value}".rstrip() for label, value in rows))
    return int(any(found["wrong"] for found in report.get("selftest", {}).values()))


def _selftest() -> dict[str, dict[str, Any]]:
    """For each device what is wrong there, and which operations it does not have."""
    import torch

    from flambeau.inspection.operation_check import OPERATIONS, differences

    devices = [torch.device("cpu")]
    if (kind := torch.accelerator.current_accelerator()) is not None:
        count = torch.accelerator.device_count()
        devices += [torch.device(kind.type, index) for index in range(count)]
    tested = {}
    for device in devices:
        found = differences(device)
        tested[str(device)] = {
            "operations": len(OPERATIONS),
            "wrong": [
                f"{one.operation} in {one.dtype} ({_what_is_wrong(one)})"
                for one in found
                if not one.is_missing
            ],
            "missing": [f"{one.operation} in {one.dtype}" for one in found if one.is_missing],
        }
    return tested


def _what_is_wrong(one: "Difference") -> str:
    return one.message or f"off by {one.error:.2g} of the largest value"


def _report(disk: Path | None) -> dict[str, Any]:
    from flambeau.cli.nvidia_driver import cuda_of_driver
    from flambeau.images.native.kernel import kernel_status
    from flambeau.recipes.setup.environment import environment

    speed = {} if disk is None else {"disk": disk_speed(disk)}
    facts = environment()
    served = cuda_of_driver()
    return {
        "flambeau": __version__,
        **facts,
        "cuda_of_driver": None if served is None else "{}.{}".format(*served),
        "shared_memory_free_bytes": _free("/dev/shm"),
        **speed,
        "images": {"jpeg": f"simplejpeg {_version('simplejpeg')}", "kernel": kernel_status()},
        "extras": _extras(),
        "problems": [*_problems(), *_driver_problems(facts["cuda_build"], served)],
    }


def _driver_problems(build: str | None, served: tuple[int, int] | None) -> list[str]:
    """Whether torch and the NVIDIA driver fit: the driver must be for torch's major CUDA version or newer."""
    if served is None:
        return []
    driver = "the NVIDIA driver here serves CUDA {}.{}".format(*served)
    remedy = f"install the build that fits by `{_INSTALL}`"
    if build is None:
        return [f"torch is built without CUDA, and {driver}: {remedy}"]
    if int(build.partition(".")[0]) > served[0]:
        return [
            f"torch is built for CUDA {build}, and {driver} at most: {remedy}, or update the driver"
        ]
    return []


def _free(folder: str) -> int | None:
    """Free bytes for batches of data workers; None if there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _extras() -> dict[str, list[str] | str]:
    """The optional parts of flambeau: 'installed', or the missing packages."""
    from importlib import metadata

    try:
        wanted = metadata.requires("flambeau") or []
    except metadata.PackageNotFoundError:  # a checkout on Python's path
        return {}
    extras: dict[str, list[str] | str] = {}
    for extra in metadata.metadata("flambeau").get_all("Provides-Extra") or []:
        if extra not in _DEVELOPMENT_EXTRAS:
            lines = [re.match(rf"([\w.-]+).*; *extra == ['\"]{extra}['\"]", one) for one in wanted]
            names = [line[1] for line in lines if line is not None]
            missing = [f"{name} is missing" for name in names if _version(name) is None]
            extras[extra] = missing or "installed"
    return extras


def _problems() -> list[str]:
    """Packages that do not fit together: torchvision records the torch it was built with."""
    from importlib import metadata

    here, torchvision = _version("torch"), _version("torchvision")
    if here is None or torchvision is None:
        return []
    for line in metadata.requires("torchvision") or []:
        wanted = re.match(r"torch *\(?([=>]=)([\d.]+)", line)
        if wanted is not None:
            fits = _release(here) >= _release(wanted[2])
            if wanted[1] == "==":
                fits = _release(here) == _release(wanted[2])
            if not fits:
                needs = f"torch{wanted[1]}{wanted[2]}"
                return [f"torchvision {torchvision} needs {needs}, and torch {here} is here"]
    return []


def _release(version: str) -> list[int]:
    """2.14.1+cu130 as [2, 14, 1]."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _version(package: str) -> str | None:
    from importlib import metadata  # 30 ms that no other command should pay

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _rows(report: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for name, value in report.items():
        label = indent + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _rows(value, indent + "  ")
        elif name.endswith("_bytes") and isinstance(value, int):
            yield label.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"
        else:
            yield label.removesuffix(" bytes"), _words(value)


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


_MIB = 1 << 20
_PIECE = 32 * _MIB  # written between two calls of fsync; chosen
_MAX = 512 * _MIB
_SECONDS = 3.0  # each for writing and reading; a slow disk adds one fsync


def disk_speed(
    folder: Path, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, str | int | float | None]:
    """Write at most 512 MiB, a third of the free space, for about three seconds, and read as long.

    `write_mib_per_s` includes fsync; `read_mib_per_s` bypasses the cache (None if impossible).
    """
    if not folder.is_dir():
        raise InputError(f"--disk {folder}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if free < 3 * _PIECE:
        raise InputError(
            f"--disk {folder}: {free // _MIB} MiB are left there, too few to measure it"
        )
    try:
        # Without a name, where possible, not even SIGKILL leaves it behind.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            size, write = _write(file, min(_MAX, free // 3), clock)
            read = _read(file, size, clock)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(
            f"--disk {folder}: {why}; name a folder that you may write into"
        ) from error
    return {
        "folder": str(folder),
        "write_mib_per_s": round(write, 1),
        "read_mib_per_s": None if read is None else round(read, 1),
        "free_bytes": free,
    }


def _write(file: IO[Any], most: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Bytes written, and MiB per second."""
    noise = os.urandom(_PIECE)  # a file system may compress anything else
    size = 0
    start = clock()
    while size + _PIECE <= most and clock() - start < _SECONDS:
        left = memoryview(noise)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
        size += _PIECE
    return size, size / _MIB / max(clock() - start, 1e-9)


def _read(file: IO[Any], size: int, clock: Callable[[], float]) -> float | None:
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    buffer = memoryview(bytearray(_PIECE))
    start = clock()
    done = 0
    while done < size and clock() - start < _SECONDS:
        done += os.readv(file.fileno(), [buffer])
    return done / _MIB / max(clock() - start, 1e-9)
