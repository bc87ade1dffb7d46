"""Which wheels pip accepts here, and why it does not accept another one."""

import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from flambeau.cli.nvidia_driver import cuda_of_driver
from flambeau.errors import InputError

if TYPE_CHECKING:
    from packaging.tags import Tag


def accepted_here() -> dict[str, str | None]:
    """The tag of the most special wheels that pip accepts, in its three parts, and the C library.

    Wheels for an older C library, the stable ABI of older interpreters, or any platform are accepted too.
    """
    from packaging.tags import sys_tags

    tags = list(sys_tags())
    # Nobody publishes wheels for a bare 'linux'.
    best = next((tag for tag in tags if not tag.platform.startswith("linux_")), tags[0])
    return {
        "python": best.interpreter,
        "abi": best.abi,
        "platform": best.platform,
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }


@dataclass(frozen=True)
class Fit:
    """What pip and the driver say to a wheel.

    Attributes:
        why_not: why pip would not install it here; empty where it would.
        remarks: what will not work although pip installs it.
    """

    why_not: list[str]
    remarks: list[str]


def fit(name: str) -> Fit:
    """Whether a wheel fits this interpreter and this machine.

    Args:
        name: of the file, its path or its address; the file need not be here.

    Raises:
        InputError: this is no name of a wheel.
    """
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    base = unquote(re.split(r"[?#]", name)[0].replace(os.sep, "/").rpartition("/")[2])
    try:
        _, version, _, tags = parse_wheel_filename(base)
    except InvalidWheelFilename as error:
        raise InputError(
            f"{name!r} is no name of a wheel: {str(error).partition(': ')[0].lower()}\n"
            "Give it as NAME-VERSION-PYTHON-ABI-PLATFORM.whl, such as "
            "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl"
        ) from error
    here = list(sys_tags())
    built = re.fullmatch(r"cu(\d+)(\d)", version.local or "")
    return Fit(
        why_not=[] if tags & set(here) else _reasons(tags, here),
        remarks=_of_cuda((int(built[1]), int(built[2]))) if built else [],
    )


def _reasons(tags: "frozenset[Tag]", here: "list[Tag]") -> list[str]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pairs = {(tag.interpreter, tag.abi) for tag in tags}
    found = []
    if pairs.isdisjoint((tag.interpreter, tag.abi) for tag in here):
        named = ", ".join("-".join(pair) for pair in sorted(pairs))
        found.append(f"it is for the interpreter {named}, and here is Python {python}")
    if {tag.platform for tag in tags}.isdisjoint(tag.platform for tag in here):
        found.append(_of_platform(", ".join(sorted({tag.platform for tag in tags}))))
    # An interpreter that is older, for instance, is accepted without its ABI alone.
    return found or ["its interpreter and its platform fit, but not together"]


def _of_platform(named: str) -> str:
    glibc = re.search(r"manylinux_(\d+)_(\d+)_", named)
    if glibc and sys.platform == "linux" and platform.machine() in named:
        have = accepted_here()["libc"] or "another C library"
        return f"it needs glibc {glibc[1]}.{glibc[2]} or later, and here is {have}"
    return f"it is for the platform {named}, and here is {accepted_here()['platform']}"


def _of_cuda(built: tuple[int, int]) -> list[str]:
    """What the driver says to a build: it runs if its major version of CUDA is not newer."""
    driver = cuda_of_driver()
    if driver is None:
        return [f"it is built for CUDA {built[0]}.{built[1]}, and there is no NVIDIA driver here"]
    if driver[0] < built[0]:
        return [
            f"it is built for CUDA {built[0]}.{built[1]}, and the driver here serves CUDA "
            f"{driver[0]}.{driver[1]} at most"
        ]
    return []
