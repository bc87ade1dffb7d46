"""Builds the optional C kernel of flambeau.data.images.native with the package.

编译安装包时，一并编译 flambeau.data.images.native 的可选 C 内核。

Source: own; hatchling's build hook interface.
Without a compiler, or where it fails, the package is installed without the kernel: it works, only slower.
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

FOLDER = Path("src/flambeau/data/images/native")
LIBRARY = FOLDER / "_kernel.so"


class KernelBuildHook(BuildHookInterface):
    """Runs before a wheel, editable or not, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        reason = build(root)
        if reason:
            self.app.display_warning(f"flambeau is built without its C kernel: {reason}")
            # An older library must not get into the wheel: it may have been built for another machine.
            (root / LIBRARY).unlink(missing_ok=True)
            return
        build_data["artifacts"].append(LIBRARY.as_posix())  # git ignores it, so it must be named
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # ctypes: any version of Python


def build(root: Path) -> str:
    """Compile the kernel in place.

    Args:
        root: the folder of pyproject.toml.

    Returns:
        Why there is no kernel; empty if there is one.
    """
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler (cc, gcc or clang)"
    sources = sorted(str(path) for path in (root / FOLDER).glob("*.c"))
    if not sources:
        return f"no sources in {root / FOLDER}"
    with tempfile.TemporaryDirectory(dir=root / FOLDER) as folder:
        made = Path(folder) / LIBRARY.name
        command = [
            compiler,
            "-std=c11",
            "-O3",
            "-fPIC",
            "-fvisibility=hidden",
            "-shared",
            "-o",
            str(made),
            *sources,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip()[:500]}"
        # In one step: a process that has the old library loaded keeps it.
        made.replace(root / LIBRARY)
    return ""


def find_compiler() -> str | None:
    """$CC, or the first of cc, gcc, clang; none on Windows, whose compiler takes other options."""
    if sys.platform == "win32":
        return None
    wanted = shlex.split(os.environ.get("CC", ""))[:1] or ["cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, wanted)), None)
