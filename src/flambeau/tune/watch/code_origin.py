"""Whose code runs: the user's, a package's, torch's, or Python's own.

A path alone does not show it. Python 3.13 made `pathlib.py` a folder, parts of the standard library are
frozen or zipped, its folder is often reached by a link (`cpython-3.12` of uv, an alias of pyenv), a venv may
lie inside of the project, and a project inside of a folder named site-packages.
"""

import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePath
from types import FrameType
from typing import NamedTuple

_SITES = "site-packages", "dist-packages"
_MAX_NAMES = 20_000  # of a folder that are read; chosen
_MADE_BY_INDUCTOR = "torchinductor_", "torch._inductor.runtime.compile_tasks"
# The standard library of another Python than this one.
_ELSEWHERE = re.compile(r".*/(?:lib|lib64)/python3\.\d+/|.*/python3\d+\.zip/")
_FLAMBEAU = f"{Path(__file__).resolve().parents[2]}/"


class Origin(NamedTuple):
    """Where code comes from.

    Attributes:
        owner: user, library, torch; '' for Python's own, flambeau's and generated code.
        module: its dotted name; '' for the script itself, and if unknown.
    """

    owner: str
    module: str


def origin_of(frame: FrameType) -> Origin:
    named = frame.f_globals.get("__name__")
    return origin_of_file(frame.f_code.co_filename, named if isinstance(named, str) else "")


def origin_of_file(file: str, name: str = "") -> Origin:
    """Whose code a file is; `name` is that of its module, if known."""
    if file.startswith("<"):
        return Origin("", file[8:-1] if file.startswith("<frozen ") else "")
    root, owner = _root_of(file)
    if name in ("", "__main__", "__mp_main__"):
        name = "" if root is None else _module_at(file[len(root) :])
    if (
        file.startswith(_FLAMBEAU)
        or _MADE_BY_INDUCTOR[0] in file
        or name.startswith(_MADE_BY_INDUCTOR[1])
    ):
        return Origin("", name)
    if name == "torch" or name.startswith("torch."):
        return Origin("torch", name)
    return Origin(owner, name)


def in_package(file: str) -> str:
    """A file's path from the folder that its package is installed in; '' for any other file."""
    root, owner = _root_of(file)
    return file[len(root) :] if root is not None and owner == "library" else ""


def _module_at(path: str) -> str:
    """The dotted module name of a path relative to a folder of modules."""
    parts = PurePath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)


def _root_of(file: str) -> tuple[str | None, str]:
    """The folder (with a slash) that module names count from, None for the user's code; and the owner."""
    installed = _site_of(file) or next((f for f in _package_folders() if file.startswith(f)), None)
    if installed is not None:
        return installed, "library"
    for root in _stdlib():
        if file.startswith(root) and _is_stdlib(file[len(root) :]):
            return root, ""
    other_python = _ELSEWHERE.match(file)
    if other_python is not None and _is_stdlib(file[other_python.end() :]):
        return other_python.group(), ""
    scripts = f"{sysconfig.get_path('scripts')}/"
    if file.startswith(scripts) and "/" not in file[len(scripts) :]:  # they only start a package
        return scripts, "library"
    return None, "user"


def _is_stdlib(path: str) -> bool:
    """Whether a path relative to a stdlib folder is in the stdlib: projects may lie there, too."""
    first = path.partition("/")[0].removesuffix(".py").removesuffix(".pyc")
    return first in sys.stdlib_module_names


def _site_of(file: str) -> str | None:
    """The innermost site-packages or dist-packages folder around a file."""
    parts = file.split("/")
    for end in range(len(parts) - 2, 0, -1):
        folder = "/".join(parts[: end + 1])
        if parts[end] in _SITES and _is_site(folder):
            return f"{folder}/"
    return None


@functools.lru_cache(maxsize=256)
def _is_site(folder: str) -> bool:
    """Whether packages are installed in it; a folder that is not on this machine counts by its name."""
    return folder in _interpreter_sites() or not Path(folder).is_dir() or _has_distributions(folder)


def _has_distributions(folder: str) -> bool:
    """Whether it has a dist-info folder, which a project that is used in place has not."""
    try:
        with os.scandir(folder) as entries:
            return any(one.name.endswith(".dist-info") for one in islice(entries, _MAX_NAMES))
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _interpreter_sites() -> frozenset[str]:
    """Site folders of this interpreter, whatever their names."""
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    sites |= set(getattr(site, "getsitepackages", list)())
    return frozenset(sites | {getattr(site, "USER_SITE", None) or ""}) - {""}


@functools.lru_cache(maxsize=1)
def _package_folders() -> tuple[str, ...]:
    """Installed packages' folders under any name, as of `pip install --target` or a PEX; not the script's."""
    entries = {entry for entry in sys.path[1:] if PurePath(entry).is_absolute()}
    return _with_slash({*_interpreter_sites(), *filter(_has_distributions, entries)})


@functools.lru_cache(maxsize=1)
def _stdlib() -> tuple[str, ...]:
    """Folders of Python's own modules, by every path that leads there."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    # A frozen module has a file, too, and a zipped one is inside of its zip.
    folders |= {str(Path(module.__file__ or "").parent) for module in (os, functools)}
    folders |= {entry for entry in sys.path if re.fullmatch(r".*/python3\d+\.zip", entry)}
    return _with_slash(folders | {str(Path(folder).resolve()) for folder in folders})


def _with_slash(folders: Iterable[str]) -> tuple[str, ...]:
    """The longest first, as one may be inside of another."""
    return tuple(sorted((f"{one}/" for one in folders if one), key=len, reverse=True))
