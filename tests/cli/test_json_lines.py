"""`flambeau train --json-lines`: what happens as JSON on standard output; and errors of `--json`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flambeau import terminal
from flambeau.run.run import Run

LINEAR = """
from torch import nn

print("made by a user's own code")

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
SHORT = "--epochs 2 --batch-size 4 --precision fp32 --model linear.py:make"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear.py").write_text(LINEAR, encoding="utf-8")


def events(out: str) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in out.splitlines()]


def test_what_happens_is_one_object_per_line(flambeau: Any, images: Path) -> None:
    code, out, err = flambeau("train", images, SHORT, "--out run --json-lines --log-every 2")
    assert code == 0
    start, *middle, end = events(out)
    assert start["event"] == "start"
    assert (start["folder"], start["step"], start["steps"]) == ("run", 0, 8)
    assert (start["train_images"], start["val_images"]) == (16, 8)
    assert start["settings"]["model"].endswith("linear.py:make")
    assert set(start["given"]) == {
        "data",
        "duration",
        "batch_size",
        "precision",
        "model",
        "log_every",
    }
    rows = list(map(json.loads, Path("run/metrics.jsonl").read_text().splitlines()))
    logs = [
        {k: v for k, v in row.items() if k != "event"} for row in middle if row["event"] == "log"
    ]
    assert logs == [row for row in rows if "train_loss" in row]
    epochs = [row for row in middle if row["event"] == "epoch"]
    assert [(row["epoch"], row["step"]) for row in epochs] == [(0, 4), (1, 8)]
    assert epochs[0]["best"]
    assert epochs[0]["metrics"] == {k: v for k, v in rows[2].items() if k.startswith("val_")}
    assert epochs[0]["train_loss"] == pytest.approx(sum(r["train_loss"] for r in rows[:2]) / 2)
    saved = [row["path"] for row in middle if row["event"] == "checkpoint"]
    assert saved[0] == "run/checkpoints/step-00000000"
    assert saved[-1] == "run/checkpoints/step-00000008"
    result = json.loads(Path("run/result.json").read_text())
    assert end == {
        "event": "end", "folder": "run", "file": "run/model.safetensors", "already": False,
        **{name: result[name] for name in ("weights", "step", "metrics")},
    }  # fmt: skip
    assert "made by a user's own code" in err
    assert "finished: " in err

    again = flambeau("train", images, SHORT, "--out run --json-lines --log-every 2")
    assert events(again.out) == [{**end, "already": True}]


def test_trials_have_one_line_each(flambeau: Any, images: Path) -> None:
    answer = flambeau("train", images, SHORT, "--dry-run --json-lines")
    assert answer.code == 0, answer.err
    (cost,) = events(answer.out)
    assert (cost["event"], cost["batch_size"], cost["fitting"]) == ("dry_run", 4, 4)
    assert cost["total_s"] == pytest.approx(cost["steps"] * cost["step_s"])
    assert f"the run has {cost['steps']} steps of {cost['steps_per_epoch']} per epoch" in answer.err
    answer = flambeau("train", images, SHORT, "--find-lr lr.svg --json-lines")
    assert answer.code == 0, answer.err
    (curve,) = events(answer.out)
    assert (curve["event"], curve["file"]) == ("find_lr", "lr.svg")
    assert len(curve["rates"]) == len(curve["losses"])
    assert curve["suggested"] is None or f"--lr {curve['suggested']:.2g}" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--lr fast", 2, "--lr: must be a number, got 'fast'"),
        ("--epohs 3", 2, "did you mean '--epochs'?"),
        ("--dry-run --find-lr lr.svg", 2, "leave one of them out"),
        ("--out linear.py", 2, "linear.py"),
        ("--replay-step x.json", 2, "leave --json-lines out"),
    ],
)
def test_the_last_line_says_what_went_wrong(
    flambeau: Any, words: str, code: int, message: str
) -> None:
    answer = flambeau("train --json-lines", words)
    assert answer.code == code
    (event,) = events(answer.out)
    assert (event["event"], event["exit_code"]) == ("error", code)
    assert message in event["message"]
    assert message in answer.err


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("runs nowhere --json", "nowhere", "flambeau runs --help"),
        ("models --json --nothing", "unknown flag --nothing", "flambeau models --help"),
        ("predict run photo.jpg --json", "run", "flambeau predict --help"),
        ("--json runs", "--json", "flambeau --help"),
        ("verify nothing --json", "nothing does not exist", "Give the folder of a run"),
        ("how qzqzq --json", "no page knows any of 'qzqzq'", "Name it in other words"),
        ("recipes find qzqzq --json", "nothing found for 'qzqzq'", "flambeau recipes --help"),
    ],
)
def test_programs_get_errors_as_json(flambeau: Any, words: str, error: str, hint: str) -> None:
    answer = flambeau(words)
    code = 1 if "qzqzq" in words else 2
    assert (answer.code, answer.out) == (code, "")
    (line,) = answer.err.splitlines()
    found = json.loads(line)
    assert list(found) == ["error", "hint", "exit_code"]
    assert error in found["error"]
    assert found["exit_code"] == code
    assert hint in found["hint"]


def test_the_json_of_a_script_is_not_the_commands(flambeau: Any) -> None:
    assert flambeau("launch nothing.py --json").err.startswith("flambeau: ")
    assert flambeau("sweep --set lr=1..0 -- python train.py --json").err.startswith("flambeau: ")


def test_an_error_of_any_other_kind_is_told_and_raised(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Run, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flambeau("train", images, SHORT, "--json-lines")
    assert events(capsys.readouterr().out)[-1] == {
        "event": "error", "message": "ZeroDivisionError: division by zero", "exit_code": 1
    }  # fmt: skip


def test_a_preempted_run_says_so(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    original = Run.step

    def with_signal(self: Run, loss: Any) -> None:
        if self.state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    monkeypatch.setattr(Run, "step", with_signal)
    code, out, _ = flambeau("train", images, SHORT, "--out run --json-lines")
    assert code == 75
    assert events(out)[-1] == {"event": "stopped", "folder": "run", "exit_code": 75}
    assert events(out)[-2] == {"event": "checkpoint", "path": "run/checkpoints/step-00000003"}


def test_the_training_outlives_its_reader(images: Path, forked_python: Any) -> None:
    """As with `| head -1`."""
    os.mkfifo("pipe")
    Path("errors").touch()
    words = ["-m", "flambeau", "train", images, *SHORT.split(), "--json-lines", "--out", "run"]
    training = forked_python(words, output=Path("pipe"), errors=Path("errors"))
    with Path("pipe").open() as reader:
        assert json.loads(reader.readline())["event"] == "start"
    code, err = training.wait(120), Path("errors").read_text(encoding="utf-8")
    assert code == 0, err
    assert "nobody reads standard output any more" in err
    assert Path("run/result.json").is_file()


def test_settings_that_were_given_come_first_and_fit(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 80)
    err = flambeau("train", images, SHORT, "--lr 0.05 --out run").err
    lines = err.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("  given "))
    shown = lines[first : lines.index("the run is in run")]
    assert all(len(line) <= 80 or len(line.split()) <= 2 for line in shown)  # no word is broken
    given = " ".join(shown[: next(k for k, line in enumerate(shown) if line.startswith("  data "))])
    assert f"data={images}" in err
    for text in (
        "duration=2ep",
        "batch_size=4",
        "precision=fp32",
        "lr=0.05",
    ):
        assert text in given
        assert err.count(f" {text}") == 1
    assert "momentum=0.9" in err.split()


def test_no_settings_above_an_error(flambeau: Any, images: Path) -> None:
    Path("file").touch()
    for words in ("--out file/run", "--freeze nothing.such", "--weights missing.pth"):
        code, out, err = flambeau("train", images, SHORT, words)
        assert (code, out) == (2, "")
        assert "lr=" not in err
        assert len([line for line in err.splitlines() if "own code" not in line]) <= 2
