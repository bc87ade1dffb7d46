"""What version 0.1 wrote is read for ever: its packed files record by record, its runs to the end.

The files under fixtures/version_0_1 were made by that version, those of own loops by its last commit.
`expected.json` holds what it read from them.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flambeau.data.sources.open_data import open_parts
from flambeau.run.folder.published_weights import Result

FIXTURES = Path(__file__).parent / "fixtures" / "version_0_1"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))


def digest(stored: Any) -> str:
    """SHA-256 of an image as it is stored: the bytes of its file, or its shape, dtype and pixels."""
    if isinstance(stored, bytes):
        return hashlib.sha256(stored).hexdigest()
    array = np.ascontiguousarray(stored)
    head = f"{array.shape} {array.dtype}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def contents(path: Path) -> dict[str, Any]:
    """Classes, labels and digests of what a packed file holds."""
    source, val = open_parts(path)
    assert val is None
    return {
        "classes": list(source.classes),
        "labels": source.labels.tolist(),
        "images": [digest(source.read(index)) for index in range(len(source))],
    }


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A copy of the packed files: opening some of them leaves an index beside them."""
    return Path(shutil.copytree(FIXTURES / "packed", tmp_path / "packed"))


@pytest.fixture
def runs(tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, and the working directory of the command that made them."""
    folder = shutil.copytree(FIXTURES / "trained", packed, dirs_exist_ok=True)
    for run in ("command_finished", "command_stopped"):
        config = folder / run / "config.toml"
        text = config.read_text(encoding="utf-8")
        for name in ("images.rec", "model.py:tiny"):
            assert f'"{name}"' in text
            text = text.replace(f'"{name}"', f'"{folder / name}"')
        config.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return Path(folder)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_packed_file_is_read_as_it_was(name: str, packed: Path) -> None:
    packages = {".h5": "h5py", ".lmdb": "lmdb", ".n5": "tensorstore"}
    pytest.importorskip(packages.get(Path(name).suffix, "json"))
    assert contents(packed / name) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_packed_file_is_called_whole(name: str, packed: Path, flambeau: Callable[..., Any]) -> None:
    assert flambeau("verify", packed / name).code == 0


COMMAND = "train images.rec --model model.py:tiny --image-size 16 --duration 4ep --batch-size 4"
COMMAND += " --ema 0.9 --precision fp32"


def test_stopped_command_goes_on(runs: Path, flambeau: Callable[..., Any]) -> None:
    answer = flambeau(COMMAND, "--out command_stopped")
    assert (answer.code, "step 4 of 12" in answer.err) == (0, True), answer.err
    assert_same_end(runs / "command_stopped", runs / "command_finished")


def test_stopped_command_with_another_setting_is_refused(
    runs: Path, flambeau: Callable[..., Any]
) -> None:
    answer = flambeau(COMMAND, "--seed 1 --out command_stopped")
    assert answer.code == 2
    assert "seed" in answer.err


def test_finished_command_predicts_and_is_whole(runs: Path, flambeau: Callable[..., Any]) -> None:
    before = (runs / "command_finished" / "model.safetensors").read_bytes()
    assert flambeau("verify command_finished").code == 0
    answer = flambeau("predict command_finished images.rec")
    assert answer.code == 2  # it names a file of code, and the records of who made a run came later
    assert "flambeau predict command_finished images.rec --trust" in answer.err
    answer = flambeau("predict command_finished images.rec --trust")
    assert answer.code == 0
    assert "ant" in answer.out and "bee" in answer.out
    assert flambeau(COMMAND, "--out command_finished").code == 0  # finished: nothing to do
    assert (runs / "command_finished" / "model.safetensors").read_bytes() == before
    assert (
        flambeau("predict command_finished images.rec").code == 0
    )  # for its user has named it again


def test_own_loop_goes_on(runs: Path, run_python: Any) -> None:
    answer = run_python("loop.py", "own_loop_stopped")
    assert answer.returncode == 0, answer.stderr
    assert "step 7 of 12" in answer.stderr
    assert_same_end(runs / "own_loop_stopped", runs / "own_loop_finished")


def test_own_loop_with_another_config_is_refused(runs: Path, run_python: Any) -> None:
    script = runs / "loop.py"
    script.write_text(script.read_text(encoding="utf-8").replace("as written", "other"), "utf-8")
    answer = run_python("loop.py", "own_loop_stopped")
    assert answer.returncode != 0
    assert "note" in answer.stderr


def test_the_command_leaves_the_run_of_a_script_alone(
    runs: Path, flambeau: Callable[..., Any]
) -> None:
    before = (runs / "own_loop_finished" / "config.toml").read_bytes()
    answer = flambeau("train images.rec --out own_loop_finished")
    assert answer.code == 2
    assert "holds a run of a script, not of `flambeau train`" in answer.err
    assert (runs / "own_loop_finished" / "config.toml").read_bytes() == before


def test_finished_own_loop_stays_finished(runs: Path, run_python: Any) -> None:
    answer = run_python("loop.py", "own_loop_finished")
    assert answer.returncode == 0, answer.stderr
    result = json.loads((runs / "own_loop_finished" / "result.json").read_text(encoding="utf-8"))
    assert answer.stdout.strip() == repr(Result(**result))


@pytest.mark.parametrize("run", ["own_loop_finished", "own_loop_stopped"])
def test_own_loop_without_a_builder_says_what_to_give(
    runs: Path, flambeau: Callable[..., Any], run: str
) -> None:
    before = (runs / run / "config.toml").read_bytes()
    for command in ("predict", "evaluate"):
        answer = flambeau(f"{command} {run} images.rec")
        assert answer.code == 2
        assert "does not say how its model is made" in answer.err
        assert 'builder="FILE.py:FUNCTION", preprocess= and classes=' in answer.err
    assert (runs / run / "config.toml").read_bytes() == before


def assert_same_end(run: Path, finished: Path) -> None:
    """Another processor may round otherwise; on the one that wrote them the bits are the same."""
    ours = load_file(run / "model.safetensors")
    torch.testing.assert_close(
        ours, load_file(finished / "model.safetensors"), rtol=1e-3, atol=1e-4
    )
    steps = [
        [
            json.loads(line)["step"]
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for folder in (run, finished)
    ]
    assert steps[0] == steps[1]
