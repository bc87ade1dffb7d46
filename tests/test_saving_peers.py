"""Some cases of bench/faults/saving_peers.py, and that what is bad is seen."""

import platform
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "saving_peers.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="numbers of its system calls"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("home", "tmp"):
        (tmp_path / "case" / name).mkdir(parents=True)
    return tmp_path / "case"


@pytest.mark.parametrize("way", ["torch.save, a file each", "flambeau"])
def test_a_bit_at_rest(script: ModuleType, folder: Path, tmp_path: Path, way: str) -> None:
    """torch.save notices some damages; `Run` all of them, and goes on from the checkpoint before."""
    right = script.train(way, folder).weights
    script.shutil.rmtree(folder)
    stopped = script.prepared(way, folder, script.STOP_AT)
    assert stopped.started.code == 9
    newest = script.checkpoints(way, folder)[-1]
    file = newest / "training_state.pt" if newest.is_dir() else newest
    content = bytearray(file.read_bytes())
    content[-22] ^= 1  # where a zip file says what is in it
    file.write_bytes(content)
    outcome = script.outcome(way, folder, stopped.saved, right)
    assert outcome == ("older" if way == "flambeau" else "by hand")


def test_a_kill_in_the_second_save_of_one_file(script: ModuleType, folder: Path) -> None:
    way = "torch.save, one file"
    whole = script.train(way, folder)
    assert (whole.started.code, whole.resumed, whole.saved) == (0, 0, 12)
    calls = [call for call in whole.started.calls if call.path == "out/checkpoint.pt"]
    second = [call for call in calls if call.name == "create"][1]
    script.shutil.rmtree(folder)
    fault = script.Fault(calls[calls.index(second) + 1], "kill")
    assert script.judge(way, "kill", fault, folder, whole.weights, random.Random(0)) == "lost"


@pytest.mark.parametrize(
    ("resumed", "weights", "said", "outcome"),
    [
        (9, "right", "", "goes on"),
        (6, "right", "checkpoint step-9 is damaged", "older"),
        (6, "right", "", "in silence"),
        (0, "right", "", "in silence"),
        (9, "other", "", "in silence"),
    ],
)
def test_outcomes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    resumed: int, weights: str, said: str, outcome: str,
) -> None:  # fmt: skip
    started = script.Started(0, said, [], [], [], hung=False)
    run = script.Run(started, resumed, 0, weights)
    monkeypatch.setattr(script, "train", lambda way, folder: run)
    assert script.outcome("DCP", tmp_path, 9, "right") == outcome
