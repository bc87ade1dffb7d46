"""`flambeau env`: what a run would use here, to read or to paste into a bug report."""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flambeau.cli.table import print_table
from flambeau.errors import InputError
from flambeau.version import __version__

_OF_DEVELOPERS = {"dev", "docs", "bench"}

HELP = "report versions, devices and usable CPUs, and what fits this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to report, or to say of a wheel or an index."""
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--disk",
        nargs="?",
        const=".",
        metavar="FOLDER",
        help="measure how fast a folder is written and read, some six seconds (default: this one)",
    )
    parser.add_argument(
        "--wheel", metavar="NAME", help="say whether a wheel of this name fits here, and if not why"
    )
    parser.add_argument(
        "--pip", action="store_true", help="print the lines that install torch for this machine"
    )
    parser.add_argument(
        "--mirror", metavar="URL", help="of PyPI, for --pip and --check; https:// only"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="ask the mirror for each package, and which of its versions fits here",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or one of the answers; the exit code."""
    _check_flags(arguments)
    if arguments.wheel is not None:
        return _say_of_wheel(arguments.wheel)
    if arguments.mirror is not None or arguments.pip:
        return _say_of_mirror(arguments)
    report = _report(None if arguments.disk is None else Path(arguments.disk))
    text = json.dumps(report, indent=2) if arguments.json else _table(report)
    print(text, flush=True)  # flushed here, where `| head` is handled by the command
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse what does not go together, and would have no effect."""
    given = [flag for flag in ("wheel", "pip", "check") if getattr(arguments, flag)]
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} are two questions: ask one at a time")
    for flag in ("json", "disk"):
        if given and getattr(arguments, flag):
            raise InputError(f"--{flag} has no effect with --{given[0]}: leave it out")
    if arguments.mirror is not None and given not in (["pip"], ["check"]):
        raise InputError("--mirror has no effect without --pip or --check")
    if arguments.check and arguments.mirror is None:
        raise InputError("--check asks a mirror: give --mirror URL, such as https://MIRROR/simple")


def _say_of_wheel(name: str) -> int:
    from flambeau.cli.machine.wheel_tags import fit

    found = fit(name)
    print(f"{name} does not fit here" if found.why_not else f"{name} fits here")
    for line in (*found.why_not, *found.remarks):
        print(f"  {line}")
    return int(bool(found.why_not))


def _say_of_mirror(arguments: argparse.Namespace) -> int:
    from flambeau.cli.machine.install_lines import install_lines, require_https, this_machine

    mirror = None if arguments.mirror is None else require_https(arguments.mirror)
    if mirror is not None and arguments.check:
        return _check_index(mirror)
    for line in install_lines(this_machine(), mirror):
        print(line)
    return 0


def _check_index(index: str) -> int:
    """Print which version of each package an index has for this machine; 1 where one is missing."""
    from flambeau.cli.machine.package_index import newest_fitting, requirements

    found = [(wanted, newest_fitting(index, wanted)) for wanted in requirements()]
    rows = [
        (one.name, str(one.specifier) or "any", None if best is None else str(best))
        for one, best in found
    ]
    print_table(("package", "wanted", "newest that fits here"), rows)
    return int(any(best is None for _, best in found))


def _report(disk: Path | None) -> dict[str, Any]:
    from flambeau.cli.machine.disk_speed import disk_speed
    from flambeau.cli.machine.nvidia_driver import cuda_of_driver
    from flambeau.cli.machine.wheel_tags import accepted_here
    from flambeau.images.jpeg.region_decode import jpeg_decoder
    from flambeau.images.native.kernel import kernel_status
    from flambeau.recipes.setup.environment import environment

    speed = {} if disk is None else {"disk": disk_speed(disk)}
    found = environment()
    served = cuda_of_driver()
    return {
        "flambeau": __version__,
        **found,
        "cuda_of_driver": None if served is None else "{}.{}".format(*served),
        "wheels": accepted_here(),
        "shared_memory_free_bytes": _free("/dev/shm"),
        **speed,
        "images": {"jpeg": jpeg_decoder(), "kernel": kernel_status()},
        "extras": _extras(),
        "problems": [*_problems(), *_of_driver(found["cuda_build"], served)],
    }


def _of_driver(build: str | None, served: tuple[int, int] | None) -> list[str]:
    """Whether torch and the NVIDIA driver fit: a build needs a driver for its major CUDA or a newer one."""
    if served is None:
        return []
    driver = "the NVIDIA driver here serves CUDA {}.{}".format(*served)
    remedy = "`flambeau env --pip` prints the lines that install a build that fits"
    if build is None:
        return [f"torch is built without CUDA, and {driver}: {remedy}"]
    if int(build.partition(".")[0]) > served[0]:
        return [
            f"torch is built for CUDA {build}, and {driver} at most: {remedy}, or update the driver"
        ]
    return []


def _free(folder: str) -> int | None:
    """Bytes that data workers still have for batches there; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _extras() -> dict[str, list[str] | str]:
    """The optional parts of flambeau: 'installed', or the packages that are missing."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("flambeau") or []]
    except metadata.PackageNotFoundError:  # a checkout on Python's path
        return {}
    found: dict[str, list[str] | str] = {}
    for extra in metadata.metadata("flambeau").get_all("Provides-Extra") or []:
        if extra not in _OF_DEVELOPERS:
            names = [
                one.name for one in wanted if one.marker and one.marker.evaluate({"extra": extra})
            ]
            missing = [f"{name} is missing" for name in names if _version(name) is None]
            found[extra] = missing or "installed"
    return found


def _problems() -> list[str]:
    """What does not fit together: torchvision says which torch it was built with."""
    from importlib import metadata

    from packaging.requirements import Requirement

    here, torchvision = _version("torch"), _version("torchvision")
    if here is None or torchvision is None:
        return []
    wanted = [Requirement(line) for line in metadata.requires("torchvision") or []]
    return [
        f"torchvision {torchvision} needs {one}, and torch {here} is here"
        for one in wanted
        if one.name == "torch" and not one.specifier.contains(here, prereleases=True)
    ]


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
