"""The watch begins when a script imports torch, whoever has asked for torch before."""

import os
import subprocess
import sys
from pathlib import Path

ASKS = """
import importlib.util, sys
from pathlib import Path
from flambeau.tune.watch import begin
begun = []
begin._begin = begun.append
begin.begin_when_torch_comes(Path("trial"))
assert importlib.util.find_spec("torch") is not None
assert not begun and "torch" not in sys.modules
import torch.nn
assert importlib.util.find_spec("torch") is torch.__spec__
assert begun == [Path("trial")]
assert not any(isinstance(finder, begin._AfterTorch) for finder in sys.meta_path)
"""


def test_a_package_that_only_asks_for_torch_changes_nothing(tmp_path: Path) -> None:
    """As datasets of Hugging Face does, and transformers; a package of that name is enough."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "nn"):
        (tmp_path / "torch" / f"{name}.py").touch()
    path = os.pathsep.join([f"{tmp_path}", os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ASKS], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
