"""The build hook, for the tests that compile the C kernel."""

import sys
import types
from pathlib import Path

import pytest

from load_script import load_script

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """hatch_build.py, which only the build imports; hatchling need not be here."""
    path = ROOT / "hatch_build.py"
    if not path.exists():
        pytest.skip("not in a checkout")
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = type("BuildHookInterface", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return load_script(path)
