"""What `import flambeau` gives: the doors by name, and nothing loaded before one is used."""

import subprocess
import sys

import pytest

import flambeau

SCRIPT = """
import sys
import flambeau
assert {"torch", "numpy", "flambeau.train"}.isdisjoint(sys.modules), sorted(sys.modules)
assert set(flambeau.__all__) <= set(dir(flambeau))
from flambeau import Run
import flambeau.train.run
assert Run is flambeau.train.run.Run
"""


def test_nothing_is_loaded_before_it_is_used() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


@pytest.mark.parametrize("name", flambeau.__all__)
def test_each_door_opens(name: str) -> None:
    thing = getattr(flambeau, name)
    if name != "__version__":
        assert getattr(sys.modules[thing.__module__], name) is thing


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'flambeau' has no attribute 'Rum'"):
        flambeau.Rum  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Rum'"):
        from flambeau import Rum  # type: ignore[attr-defined] # noqa: F401
