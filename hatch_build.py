"""Builds the optional C kernel of flambeau.images.native with the package; adds the pages to a wheel.

Source: own; hatchling's build hook interface.
Without a compiler, or where it fails, the package is installed without the kernel: it works, only slower.
$CC names another compiler, a cross compiler too: the wheel is then tagged for its target.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/flambeau/images/native")
LIBRARY = FOLDER / "_kernel.so"
# No fused multiply-add, which clang makes by itself where there is one: the same pixels everywhere.
OPTIONS = ("-std=c11", "-O3", "-ffp-contract=off")


class WheelBuildHook(BuildHookInterface):
    """Runs before a wheel, editable or not, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "standard":  # an editable install reads the pages of its checkout
            for language in ("en", "zh"):
                build_data["force_include"][str(root / "docs" / language)] = (
                    f"flambeau/docs/{language}"
                )
        reason = build(root)
        if reason:
            self.app.display_warning(f"flambeau is built without its C kernel: {reason}")
            # An older library must not get into the wheel: it may have been built for another machine.
            (root / LIBRARY).unlink(missing_ok=True)
            return
        build_data["artifacts"].append(LIBRARY.as_posix())  # git ignores it, so it must be named
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"  # ctypes: any version of Python


def build(root: Path) -> str:
    """Compile the kernel in place.

    Args:
        root: the folder of pyproject.toml.

    Returns:
        Why there is no kernel; empty if there is one.
    """
    compiler = find_compiler()
    if not compiler:
        return "no C compiler (cc, gcc or clang)"
    sources = sorted(str(path) for path in (root / FOLDER).glob("*.c"))
    if not sources:
        return f"no sources in {root / FOLDER}"
    with tempfile.TemporaryDirectory(dir=root / FOLDER) as folder:
        made = Path(folder) / LIBRARY.name
        flags = [*OPTIONS, "-fPIC", "-fvisibility=hidden", "-shared"]
        command = [*compiler, *flags, "-o", str(made), *sources]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return f"{compiler[0]} failed: {done.stderr.strip()[:500]}"
        # In one step: a process that has the old library loaded keeps it.
        made.replace(root / LIBRARY)
    return ""


def find_compiler() -> list[str]:
    """$CC with its options, or the first of cc, gcc, clang; none on Windows, whose compiler takes others."""
    wanted = shlex.split(os.environ.get("CC", ""))
    choices = [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]
    found = (words for words in choices if shutil.which(words[0]))
    return [] if sys.platform == "win32" else next(found, [])


def platform_tag() -> str:
    """Where the library runs: here, or on the processor that the Linux compiler makes code for."""
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    machine_of = {"x86_64": "linux_x86_64", "aarch64": "linux_aarch64"}
    if not here.startswith("linux"):
        return here
    command = [*find_compiler(), "-dumpmachine"]  # such as aarch64-linux-gnu
    target = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return machine_of.get(target.partition("-")[0], here)
