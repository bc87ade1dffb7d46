"""Whose code runs, by what the interpreter says of it: the user's, a package's, torch's, or Python's own.

A path alone does not tell. Python 3.13 made `pathlib.py` a folder, parts of the standard library are frozen
or in a zip, its folder is often reached by a link (`cpython-3.12` of uv, an alias of pyenv), a venv may lie
inside of the project, and a project in a folder that is called site-packages.
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
_MOST_NAMES = 20_000  # of a folder that are looked at; chosen
_MADE_BY_INDUCTOR = "torchinductor_", "torch._inductor.runtime.compile_tasks"
# The standard library of another Python than this one.
_ELSEWHERE = re.compile(r".*/(?:lib|lib64)/python3\.\d+/|.*/python3\d+\.zip/")
_OURS = f"{Path(__file__).resolve().parents[2]}/"


class Origin(NamedTuple):
    """Of a piece of code.

    Attributes:
        owner: user, library, torch; '' of Python's own, of flambeau, and of what was made while running.
        module: its dotted name; '' of the script itself, and where nothing is known.
    """

    owner: str
    module: str


def origin_of(frame: FrameType) -> Origin:
    """Of the code that runs in a frame."""
    file = frame.f_code.co_filename
    named = frame.f_globals.get("__name__")
    name = named if isinstance(named, str) else ""
    if file.startswith("<"):
        return Origin("", file[8:-1] if file.startswith("<frozen ") else "")
    root, owner = _root_of(file)
    if name in ("", "__main__", "__mp_main__"):
        name = "" if root is None else _module_at(file[len(root) :])
    if (
        file.startswith(_OURS)
        or _MADE_BY_INDUCTOR[0] in file
        or name.startswith(_MADE_BY_INDUCTOR[1])
    ):
        return Origin("", name)
    if name == "torch" or name.startswith("torch."):
        return Origin("torch", name)
    return Origin(owner, name)


def in_package(file: str) -> str:
    """A file's path from the folder on that its package is installed in; '' of any other file."""
    root, owner = _root_of(file)
    return file[len(root) :] if root is not None and owner == "library" else ""


def _module_at(path: str) -> str:
    """The dotted name for a path below a folder of modules."""
    parts = PurePath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)


def _root_of(file: str) -> tuple[str | None, str]:
    """The folder that a module's name counts from, with a slash; None of the user's; and whose it is."""
    installed = _site_of(file) or next((f for f in _listed() if file.startswith(f)), None)
    if installed is not None:
        return installed, "library"
    for root in _stdlib():
        if file.startswith(root) and _is_of_python(file[len(root) :]):
            return root, ""
    elsewhere = _ELSEWHERE.match(file)
    if elsewhere is not None and _is_of_python(file[elsewhere.end() :]):
        return elsewhere.group(), ""
    scripts = f"{sysconfig.get_path('scripts')}/"
    if file.startswith(scripts) and "/" not in file[len(scripts) :]:  # they only start a package
        return scripts, "library"
    return None, "user"


def _is_of_python(path: str) -> bool:
    """Below a folder of the standard library there may be a project, too."""
    first = path.partition("/")[0].removesuffix(".py").removesuffix(".pyc")
    return first in sys.stdlib_module_names


def _site_of(file: str) -> str | None:
    """The innermost folder of installed packages around a file that is called as such folders are."""
    parts = file.split("/")
    for at in range(len(parts) - 2, 0, -1):
        folder = "/".join(parts[: at + 1])
        if parts[at] in _SITES and _is_site(folder):
            return f"{folder}/"
    return None


@functools.lru_cache(maxsize=256)
def _is_site(folder: str) -> bool:
    """Packages are installed in it; one that is not on this machine is believed its name."""
    return folder in _own_sites() or not Path(folder).is_dir() or _has_distributions(folder)


def _has_distributions(folder: str) -> bool:
    """A project that is installed as it lies has no dist-info beside its packages."""
    try:
        with os.scandir(folder) as entries:
            return any(one.name.endswith(".dist-info") for one in islice(entries, _MOST_NAMES))
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _own_sites() -> frozenset[str]:
    """Of this interpreter, whether or not they are called so."""
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found |= set(getattr(site, "getsitepackages", list)())
    return frozenset(found | {getattr(site, "USER_SITE", None) or ""}) - {""}


@functools.lru_cache(maxsize=1)
def _listed() -> tuple[str, ...]:
    """Folders of installed packages by any name: of `pip install --target`, of a PEX; not the script's."""
    entries = {entry for entry in sys.path[1:] if PurePath(entry).is_absolute()}
    return _with_slash({*_own_sites(), *filter(_has_distributions, entries)})


@functools.lru_cache(maxsize=1)
def _stdlib() -> tuple[str, ...]:
    """Where Python's own modules are, by any name that leads there."""
    found = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    # A frozen module has a file, too, and a zipped one is inside of its zip.
    found |= {str(Path(module.__file__ or "").parent) for module in (os, functools)}
    found |= {entry for entry in sys.path if re.fullmatch(r".*/python3\d+\.zip", entry)}
    return _with_slash(found | {str(Path(folder).resolve()) for folder in found})


def _with_slash(folders: Iterable[str]) -> tuple[str, ...]:
    """The longest first, for one may be inside of another."""
    return tuple(sorted((f"{one}/" for one in folders if one), key=len, reverse=True))
