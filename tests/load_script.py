"""A script of the checkout as a module: those of tools/, bench/ and examples/ are in no package."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: Path) -> ModuleType:
    """Run a file anew, which need not end in .py; `sys.path` stays as it is."""
    name, before = f"script_{path.stem}", list(sys.path)
    loader = importlib.machinery.SourceFileLoader(name, f"{path}")
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    loader.exec_module(module)
    sys.path[:] = before
    return module
