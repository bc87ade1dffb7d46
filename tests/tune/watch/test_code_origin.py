"""Whose code runs, in the layouts of Python 3.11 to 3.14 and of projects that lie in odd places."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flambeau.tune.doctor.formatting import shown
from flambeau.tune.watch.code_origin import Origin, in_package, origin_of
from flambeau.tune.watch.stack_phases import activity_of

UV = "/root/.local/share/uv/python/cpython-3.12-linux-x86_64-gnu/lib/python3.12"
SITE = "/env/lib/python3.12/site-packages"
LINKED = """
import sys, threading
from flambeau.tune.watch.stack_phases import activity_of
seen = []
def look(): seen.append(activity_of(sys._getframe(0).f_back))
thread = threading.Thread(target=look); thread.start(); thread.join()
print(seen[0].location)
"""


def frame_of(file: str, name: str | None, function: str = "run") -> FrameType:
    """A frame of a function in this file, of a module of this name."""
    space: dict[str, Any] = {"look": lambda: sys._getframe(1)}
    if name is not None:
        space["__name__"] = name
    exec(compile(f"def {function}():\n return look()", file, "exec"), space)
    frame: FrameType = space[function]()
    return frame


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/usr/lib/python3.11/pathlib.py", "pathlib"),
        ("/usr/lib/python3.13/pathlib/_local.py", "pathlib._local"),
        ("/usr/lib/python3.14/pathlib/__init__.py", "pathlib"),
        (f"{UV}/pathlib.py", "pathlib"),
        ("/opt/app/python312.zip/pathlib.py", "pathlib"),
        (f"{sysconfig.get_path('stdlib')}/pathlib.py", "pathlib"),
    ],
)
def test_python_s_own_code_wherever_it_lies(file: str, name: str) -> None:
    for told in (name, None):  # by its module's name, and by the path alone
        frame = frame_of(file, told, "read_bytes")
        assert origin_of(frame) == Origin("", name)
        assert activity_of(frame).kind == "read"


@pytest.mark.parametrize(
    ("file", "name", "origin"),
    [
        ("<frozen importlib._bootstrap>", "importlib._bootstrap", ("", "importlib._bootstrap")),
        ("<string>", "train", ("", "")),
        ("/home/me/train.py", "__main__", ("user", "")),
        ("/home/me/data/photos.py", "data.photos", ("user", "data.photos")),
        ("/home/me/torch/optim/train.py", "__main__", ("user", "")),
        ("/home/me/lib/python3.12/mine/train.py", "mine.train", ("user", "mine.train")),
        (f"{sysconfig.get_path('stdlib')}/mine/train.py", "mine.train", ("user", "mine.train")),
        (f"{sys.prefix}/project/train.py", "__main__", ("user", "")),
        (f"{sysconfig.get_path('scripts')}/torchrun", "__main__", ("library", "torchrun")),
        (f"{SITE}/timm/data/loader.py", "timm.data.loader", ("library", "timm.data.loader")),
        (f"{SITE}/timm/train.py", "__main__", ("library", "timm.train")),
        (f"{SITE}/torch/nn/functional.py", "torch.nn.functional", ("torch", "torch.nn.functional")),
        ("/home/me/pytorch/torch/_tensor.py", "torch._tensor", ("torch", "torch._tensor")),
        ("/home/me/kornia/kornia/core.py", "kornia.core", ("user", "kornia.core")),
        ("/tmp/torchinductor_me/ab/cabc.py", "cabc", ("", "cabc")),
    ],
)
def test_whose_it_is(file: str, name: str, origin: tuple[str, str]) -> None:
    assert origin_of(frame_of(file, name)) == Origin(*origin)


def test_folders_are_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "site-packages" / "project"
    venv = project / ".venv" / "lib" / "python3.12" / "site-packages"
    (venv / "timm-1.0.dist-info").mkdir(parents=True)
    mine, theirs = project / "train.py", venv / "timm" / "models.py"
    assert origin_of(frame_of(f"{mine}", "__main__")) == Origin("user", "")
    assert origin_of(frame_of(f"{theirs}", "timm.models")) == Origin("library", "timm.models")
    assert in_package(f"{theirs}:3") == "timm/models.py:3" and in_package(f"{mine}:3") == ""
    monkeypatch.chdir(project)
    assert shown(f"{mine}:3") == "train.py:3" and shown(f"{theirs}:3") == "timm/models.py:3"


def test_a_folder_that_is_called_torch_is_the_user_s_to_validate_in() -> None:
    frame = frame_of("/home/me/torch/optim/train.py", "__main__", "validate")
    assert activity_of(frame).phase == "evaluation"


def test_a_python_that_is_reached_by_a_link(tmp_path: Path) -> None:
    """Its files are known by the link's name: `threading.py` is the innermost line otherwise."""
    link = tmp_path / "python"
    link.symlink_to(sys.base_prefix)
    python = link / "bin" / Path(sys.executable).resolve().name
    source = Path(sys.modules["flambeau"].__path__[0]).parent
    done = subprocess.run(
        [python, "-c", LINKED],
        env={"PYTHONPATH": f"{source}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"


def test_packages_that_were_installed_into_a_folder_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "libs" / "kornia-0.8.dist-info").mkdir(parents=True)
    (tmp_path / "libs" / "kornia.py").touch()
    code = (
        "import sys; from types import SimpleNamespace as N;"
        "from flambeau.tune.watch.code_origin import origin_of;"
        f"file = {str(tmp_path / 'libs' / 'kornia.py')!r};"
        "frame = N(f_code=N(co_filename=file), f_globals={'__name__': 'kornia'});"
        "print(origin_of(frame).owner)"
    )
    source = Path(sys.modules["flambeau"].__path__[0]).parent
    paths = f"{source}:{tmp_path / 'libs'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "library\n"
