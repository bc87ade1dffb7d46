"""What `import flambeau` gives: the doors by name, and nothing loaded before one is used."""

import fnmatch
import subprocess
import sys
from pathlib import Path

import pytest

import flambeau

SCRIPT = """
import sys
import flambeau
assert {"torch", "numpy", "flambeau.trainer"}.isdisjoint(sys.modules), sorted(sys.modules)
assert set(flambeau.__all__) <= set(dir(flambeau))
from flambeau import Run
import flambeau.run.run
assert Run is flambeau.run.run.Run
"""


def test_nothing_is_loaded_before_it_is_used() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


@pytest.mark.parametrize("name", flambeau.__all__)
def test_each_door_opens(name: str) -> None:
    thing = getattr(flambeau, name)
    assert getattr(sys.modules[thing.__module__], name) is thing


def is_exception(name: str) -> bool:
    thing = getattr(flambeau, name)
    return isinstance(thing, type) and issubclass(thing, BaseException)


def test_the_doors_and_nothing_else() -> None:
    exceptions = {name for name in flambeau.__all__ if is_exception(name)}
    doors = {"Run", "RunOptions", "evaluate", "export", "fast", "load", "sweep", "train", "wrap"}
    assert set(flambeau.__all__) - exceptions == doors
    assert exceptions == {
        "DamagedData",
        "InputError",
        "NotFinite",
        "Preempted",
        "SaveFailed",
        "UntrustedCode",
        "WorkerLost",
    }
    assert flambeau.__version__.count(".") == 2


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'flambeau' has no attribute 'Rum'"):
        flambeau.Rum  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Rum'"):
        from flambeau import Rum  # type: ignore[attr-defined] # noqa: F401


TRAIN = """
import os, sys, torch
for first in sys.argv[1:]:
    if not os.fork():  # which has torch, and nothing of flambeau
        break
    assert os.wait()[1] == 0, first
else:
    sys.exit(0)
import flambeau
exec(first)
assert callable(flambeau.train)
from flambeau import train
import flambeau.run.run
assert train is flambeau.train
try:
    train("nothere", epoch=1)
except TypeError as error:
    assert str(error) == "train has no setting 'epoch'; did you mean 'epochs'?", error
else:
    raise AssertionError
"""


def test_train_is_the_same_function() -> None:
    """Whatever is imported first."""
    firsts = ["", "import flambeau.trainer.api", "from flambeau import Run"]
    subprocess.run([sys.executable, "-c", TRAIN, *firsts], check=True)


def test_no_folder_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    """pytest passes folders of some names by in silence, such as 'build'."""
    left_out = request.config.getini("norecursedirs")
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    for folder in folders:
        for part in folder.relative_to(Path(__file__).parents[1]).parts:
            assert not any(fnmatch.fnmatch(part, pattern) for pattern in left_out), folder
