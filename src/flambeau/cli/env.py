"""`flambeau env`: what a run would use here, to read or to paste into a bug report."""

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_OF_DEVELOPERS = {"dev", "bench"}

HELP = "report versions, devices and usable CPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    from flambeau.data.images.jpeg.region_decode import jpeg_decoder
    from flambeau.data.images.native.kernel import kernel_status
    from flambeau.recipes.setup.environment import environment
    from flambeau.version import __version__

    report = {
        "flambeau": __version__,
        **environment(),
        "shared_memory_free_bytes": _free("/dev/shm"),
        "images": {"jpeg": jpeg_decoder(), "kernel": kernel_status()},
        "extras": _extras(),
        "problems": _problems(),
    }
    text = json.dumps(report, indent=2) if arguments.json else _table(report)
    print(text, flush=True)  # flushed here, where `| head` is handled by the command
    return 0


def _free(folder: str) -> int | None:
    """Bytes that data workers still have for batches there; None where there is no such folder."""
    try:
        state = os.statvfs(folder)
    except (OSError, AttributeError):  # of Windows
        return None
    return state.f_bavail * state.f_frsize


def _extras() -> dict[str, list[str] | str]:
    """The optional parts of flambeau: 'installed', or the packages that are missing."""
    from importlib import metadata

    found: dict[str, list[str] | str] = {}
    for line in metadata.requires("flambeau") or []:
        package, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if package is None or extra is None or extra[1] in _OF_DEVELOPERS:
            continue
        missing = found.setdefault(extra[1], [])
        if isinstance(missing, list) and _version(package[0]) is None:
            missing.append(f"{package[0]} is missing")
    return {name: missing or "installed" for name, missing in found.items()}


def _problems() -> list[str]:
    """What does not fit together: torchvision says which torch it was built with."""
    from importlib import metadata

    here, torchvision = _version("torch"), _version("torchvision")
    if here is None or torchvision is None:
        return []
    found = []
    for line in metadata.requires("torchvision") or []:
        wanted = re.match(r"torch *\(?(==|>=) *(\d[\d.]*\d)\)?$", line)
        if wanted is None:
            continue
        there, needed = _numbers(here), _numbers(wanted[2])
        if there < needed or (wanted[1] == "==" and there != needed):
            least = " or later" if wanted[1] == ">=" else ""
            found.append(
                f"torchvision {torchvision} needs torch {wanted[2]}{least}, and {here} is here"
            )
    return found


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _version(package: str) -> str | None:
    from importlib import metadata  # 30 ms that no other command should pay

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _table(report: Mapping[str, Any]) -> str:
    rows = list(_rows(report))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:{width}}  {text}".rstrip() for label, text in rows)


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
