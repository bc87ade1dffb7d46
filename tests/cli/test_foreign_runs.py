"""Runs that came from elsewhere and name files of code: which commands run them, and when."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import flambeau as doors
from flambeau.errors import InputError
from flambeau.provenance import UntrustedCode
from flambeau.recipes.checkpoints.atomic_checkpoint import read_checkpoint, save_checkpoint

CODE = """
import os, pathlib
if os.environ.get("CANARY"):
    pathlib.Path(os.environ["CANARY"]).touch()
import numpy as np
from torch import nn

def build(channels, num_classes):
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 8), nn.Linear(8, num_classes)
    )

def photos():
    draw = np.random.default_rng(0)
    return [(draw.integers(0, 256, (8, 8, 3)).astype(np.uint8), i % 2) for i in range(20)]
"""
SHORT = "--image-size 8 --batch-size 4 --duration 6st --precision fp32"


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the code of the runs makes; the tests are in their folder, with images and no records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("code.py").write_text(CODE)
    for name in "01":
        Path("images", name).mkdir(parents=True)
        for number in range(6):
            image = Image.new("RGB", (8, 8), (number * 9, 30, 200 * int(name)))
            image.save(f"images/{name}/{number}.png")
    return tmp_path / "canary"


@pytest.fixture
def foreign(canary: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that names its model and its data, and whose records are gone, as on another machine."""
    answer = flambeau("train code.py:photos --model code.py:build --out run", SHORT)
    assert answer.code == 0, answer.err
    assert len(list(Path("state/flambeau/made").iterdir())) == 1
    shutil.move("state", "other_state")
    monkeypatch.setenv("CANARY", str(canary))
    return canary


def unfinished(run: Path = Path("run")) -> None:
    """As it was before its end."""
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink()


COMMANDS = (
    "predict run images/0/1.png", "evaluate run images", "features run images out.npy", "inspect run",
    "doctor run", "inspect run --graph g.svg", "check images --model run", "export run --out made",
    "export run --out made --data images", "train --out run --extend 2st",
    "train images --teacher run --out new",
    "train --config run/config.toml --out again",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_foreign_run_is_not_run(foreign: Path, flambeau: Any, command: str) -> None:
    answer = flambeau(command)
    assert not foreign.exists()
    assert answer.code == 2, answer
    assert re.search(r"code\.py:(build|photos)", answer.err)
    assert answer.err.rstrip().endswith(f"flambeau {command} --trust")


@pytest.mark.parametrize(
    "command",
    [
        "predict run images/0/1.png", "evaluate run images", "features run images out.npy", "inspect run",
        "doctor run --no-trials", "check images --model run", "export run --out made --images 4",
        "train --out run --extend 2st", "train images --image-size 8 --teacher run --out new --duration 2st",
    ],
)  # fmt: skip
def test_trusted_code_is_run_and_named(foreign: Path, flambeau: Any, command: str) -> None:
    answer = flambeau(command, "--trust")
    assert foreign.exists()
    assert answer.code in (0, 1 if command.startswith("check") else 0), answer.err
    assert re.search(
        r"running \S*code\.py:(build|photos), which \S*run names \(trusted\)", answer.err
    )
    assert not Path("state").exists() or command.startswith("export")  # trusted, and not made here


def test_verify_runs_nothing(foreign: Path, flambeau: Any) -> None:
    assert flambeau("verify run").code == 0
    unfinished()
    answer = flambeau("verify run")
    assert not foreign.exists()
    assert answer.code == 0, answer
    assert "a resume would be exact, from step 6" in answer.out
    assert re.search(r"if \S*code\.py:photos still gives the same images: it is code", answer.out)
    assert "whole" in answer.out and "safe" not in answer.out
    Path("code.py").write_text(CODE + "# another")
    answer = flambeau("verify run")
    assert (answer.code, "code.py has changed since" in answer.out) == (1, True)
    assert not foreign.exists()


def test_python_asks_too(foreign: Path) -> None:
    for call in (
        lambda: doors.load("run"), lambda: doors.evaluate("run", "images"),
        lambda: doors.train(out="run", extend="2st", bar=False),
    ):  # fmt: skip
        with pytest.raises(UntrustedCode, match="trust=True"):
            call()
    assert not foreign.exists()
    assert doors.load("run", trust=True)("images/0/1.png")
    assert foreign.exists()


def test_a_replay_asks_too(canary: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, more in (("run", ""), ("other", "--lr 0.5")):
        answer = flambeau(f"train images --model code.py:build --out {run} {more}", SHORT)
        assert answer.code == 0, answer.err
    shutil.move("state", "other_state")
    monkeypatch.setenv("CANARY", str(canary))
    answer = flambeau("diff run other --replay")
    assert not canary.exists()
    assert "code.py:build" in answer.out + answer.err
    answer = flambeau("diff run other --replay --trust")
    assert canary.exists()
    assert re.search(r"running \S*code\.py:build, which run names \(trusted\)", answer.err)


def test_a_step_run_again_asks_too(
    canary: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = flambeau("train images --model code.py:build --lr 1e38 --out run", SHORT)
    assert answer.code == 2, answer
    command = re.search(r"train --replay-step \S+", answer.err)
    assert command is not None
    shutil.move("state", "other_state")
    monkeypatch.setenv("CANARY", str(canary))
    answer = flambeau(command[0])
    assert (answer.code, canary.exists()) == (2, False)
    assert answer.err.rstrip().endswith("--trust")
    answer = flambeau(command[0], "--trust")
    assert canary.exists()
    assert "which run names (trusted)" in answer.err


def test_a_search_asks_too(foreign: Path, flambeau: Any) -> None:
    answer = flambeau("tune -- train --config run/config.toml")
    assert (answer.code, foreign.exists()) == (2, False)
    assert "code.py:" in answer.err


def test_own_runs_need_no_word(
    canary: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were moved and extended, and whose file was edited by its user."""
    assert flambeau("train code.py:photos --model code.py:build --out run", SHORT).code == 0
    monkeypatch.setenv("CANARY", str(canary))
    assert flambeau("train --out run --extend 2st").code == 0
    Path("run").rename("moved")
    answer = flambeau("predict moved images/0/1.png")
    assert (answer.code, canary.exists()) == (0, True)
    assert re.fullmatch(r"running \S*code\.py:build, which moved names \(your own\)\n", answer.err)
    Path("code.py").write_text(CODE + "# a remark")
    assert flambeau("predict moved images/0/1.png").code == 0


def test_a_changed_run_is_not_ones_own_any_more(canary: Path, flambeau: Any) -> None:
    assert flambeau("train images --model code.py:build --out run", SHORT).code == 0
    config = Path("run/config.toml")
    Path("evil.py").write_text(CODE)
    config.write_text(config.read_text().replace("code.py", "evil.py"))
    assert flambeau("predict run images/0/1.png").code == 2


def test_a_relative_name_is_that_of_its_place(
    canary: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign folder of equal bytes does not profit from the record of one's own."""
    from flambeau.provenance import record

    assert flambeau("train images --model code.py:build --out run", SHORT).code == 0
    config = Path("run/config.toml")
    config.write_text(
        re.sub(r'model = ".*code\.py:build"', 'model = "code.py:build"', config.read_text())
    )
    record(config.read_bytes(), ["code.py:build"])
    assert flambeau("predict run images/0/1.png").code == 0
    monkeypatch.setenv("CANARY", str(canary))
    shutil.copytree("run", "elsewhere/run")
    shutil.copy("code.py", "elsewhere/code.py")
    shutil.copytree("images", "elsewhere/images")
    monkeypatch.chdir("elsewhere")
    assert flambeau("predict run images/0/1.png").code == 2
    assert not canary.exists()


def test_who_names_the_code_again_needs_no_trust(
    foreign: Path, flambeau: Any, edit: Callable[[], None] = unfinished
) -> None:
    edit()
    assert flambeau("train --out run").code == 2
    assert flambeau("train code.py:photos --out run").code == 2  # the model is not named
    assert not foreign.exists()
    answer = flambeau("train code.py:photos --model code.py:build --out run", SHORT)
    assert answer.code == 0, answer.err
    assert flambeau("predict run images/0/1.png").code == 0


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").exists(), reason="root writes anywhere")
def test_a_home_that_cannot_be_written_ends_no_training(canary: Path, flambeau: Any) -> None:
    Path("state").write_text("a file in the way")
    assert flambeau("train images --model code.py:build --out run", SHORT).code == 0
    answer = flambeau("predict run images/0/1.png")
    assert (answer.code, "--trust" in answer.err) == (2, True)
    assert flambeau("predict run images/0/1.png --trust").code == 0


@pytest.mark.parametrize("name", ["config.toml", "model.safetensors"])
def test_a_pipe_or_device_in_a_run_is_not_waited_for(
    canary: Path, flambeau: Any, name: str
) -> None:
    assert flambeau("train images --model tiny_convnet --out run", SHORT).code == 0
    Path("run", name).unlink()
    os.mkfifo(Path("run", name))
    answer = flambeau("predict run images/0/0.png")
    assert (answer.code, "is a pipe, and no file" in answer.err) == (2, True)
    assert flambeau("verify run").code == (2 if name == "config.toml" else 1)
    Path("run", name).unlink()
    Path("run", name).symlink_to("/dev/zero")  # it has no end
    assert flambeau("predict run images/0/0.png").code == 2
    assert flambeau("verify run").code == (2 if name == "config.toml" else 1)
    teacher = flambeau("train images --model tiny_convnet --teacher run --out student", SHORT)
    assert (teacher.code, "Traceback" in teacher.err) == (2, False)


@pytest.mark.parametrize("name", ["training_state.pt", "model.safetensors"])
def test_a_sealed_checkpoint_with_a_pickle_ends_in_words(
    canary: Path, flambeau: Any, name: str
) -> None:
    """Anybody can seal a checkpoint; torch's own message would advise to run what it holds."""

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(canary), "w")

    command = ("train images --model tiny_convnet --out run", SHORT)
    assert flambeau(*command).code == 0
    for published in ("result.json", "model.safetensors"):
        Path("run", published).unlink()
    for folder in Path("run", "checkpoints").iterdir():
        found = read_checkpoint(folder)
        shutil.rmtree(folder)
        save_checkpoint(folder, {**found.files, name: pickle.dumps(Evil(), 2)}, meta=found.meta)
    answer = flambeau(*command)
    assert (answer.code, "is no checkpoint of a run: " in answer.err) == (2, True)
    assert "weights_only" not in answer.err
    assert not canary.exists()


def test_error_of_trust_is_one_of_input() -> None:
    assert issubclass(UntrustedCode, InputError)
