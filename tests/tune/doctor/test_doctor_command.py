"""`flambeau doctor` as a user types it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flambeau.cli import doctor
from flambeau.cli.command import main
from flambeau.errors import InputError
from flambeau.tune.doctor.causes import findings_of
from flambeau.tune.doctor.remedies import Remedy
from flambeau.tune.doctor.remedy_trials import Tried
from flambeau.tune.doctor.run_doctor import Diagnosis, answer_of
from flambeau.tune.doctor.trial import Trial

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(32, 64)
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return "train.py"


def test_a_script_is_watched(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "doctor",
                "--no-trials",
                "--seconds",
                "0.5",
                "--trace",
                "t.json",
                "--json",
                "--",
                script,
            ]
        )
        == 0
    )
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sum(told["shares"].values()) == pytest.approx(1)
    assert told["shares"]["backward"] > 0.05 and told["shares"]["data"] == 0
    assert told["causes"][0]["kind"] in ("small steps", "model", "optimizer")
    assert told["remedies"] == []
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)


def test_a_page_of_text(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--no-trials", "--seconds", "0.5", "--html", "page.html"]
    assert main([*words, "--", sys.executable, script, "<b>&"]) == 0
    page = Path("page.html").read_text()
    assert "of a step" in page and "backward" in page
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    text = capsys.readouterr().out
    assert "watched" in text and "of a step" in text and "backward" in text


@pytest.mark.slow
def test_changes_are_tried(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "doctor",
        "--seconds",
        "0.5",
        "--rounds",
        "2",
        "--budget",
        "40s",
        "--json",
        "--",
        script,
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    measured = [one for one in told["remedies"] if one["measured"]]
    assert measured and all(one["verdict"] for one in told["remedies"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_training_of_flambeau(
    workers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(64):
        file = Path(f"photos/{number % 2}/{number}.jpg")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (4 * number, 0, 0)).save(file)
    words = ["doctor", "--no-trials", "--seconds", "0.5", "--json", "photos", "--batch-size", "8"]
    assert main([*words, "--workers", workers, "--epochs", "100"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shares"]["backward"] > 0
    assert list(tmp_path.iterdir()) == [Path("photos").absolute()]  # its own run is gone


def test_why_a_change_failed_is_told_whole(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"line {number}\n" for number in range(2000))
    why = f"the script ended with code 1; it said last:\n{lines}ValueError: \x1b[31mtoo few"
    loader = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "place": None}
    first = {
        "steps": 100,
        "seconds": 10.0,
        "step_s": 0.1,
        "batches": 100,
        "waited_s": 5.0,
        "started_s": 0.0,
        "seen": [["main", "forward", "", "", "", 0, "", 9.0]],
        "rank": 0,
        "world": 1,
        "anomaly": False,
        "threads": 1,
        "device": "cpu",
        "graphs": 0,
        "graphs_in_window": 0,
        "graph_breaks": {},
        "loader": loader,
        "optimizer": {},
        "operations": {"count": 100, "seconds": 0.09, "small_s": 0.01, "memory_bound": 0.1},
    }
    findings = findings_of(Trial([first]))
    remedies = [Remedy(name, "how", {}, 2.0, "data") for name in ("workers=1", "workers=2", "pin")]
    failures = [why, why, "no time was left"]
    tried = [Tried(one, None, said) for one, said in zip(remedies, failures, strict=True)]
    found = Diagnosis(findings, findings.causes, tuple(tried), None)
    assert [one["failure"] for one in found.as_json()["remedies"]] == failures
    doctor._print(answer_of(found))
    text = capsys.readouterr().out
    assert "workers=1, workers=2: the script ended with code 1; it said last:\n  line 0\n" in text
    assert "characters are left out here; --json has them" in text and len(text) < 8000
    assert "  ValueError: \\x1b[31mtoo few\n" in text and "pin: no time" not in text
    assert "Traceback" not in text and text.count("ValueError") == 1


def test_what_is_run() -> None:
    def command(*words: str) -> list[str]:
        return doctor.command_of(words, verb="tune")

    assert command("--", "torchrun", "train.py") == ["torchrun", "train.py"]
    assert command("--", "train.py", "--lr", "1") == [sys.executable, "train.py", "--lr", "1"]
    train = [sys.executable, "-m", "flambeau", "train", "--model", "resnet18"]
    for words in (["--model", "resnet18"], ["--", "train", "--model", "resnet18"],
                  ["--", "flambeau", "train", "--model", "resnet18"]):  # fmt: skip
        assert command(*words) == train


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "nothing to run behind --: flambeau tune --"),
        (["--modle", "resnet18"], "unknown flag --modle; did you mean '--model'"),
        (["--modle", "--", "train.py"], "unknown flag --modle before the --"),
        (
            ["--", "flambeau", "doctor", "--", "x.py"],
            "flambeau doctor: tune needs a training: flam",
        ),
        (["--", "flambeau"], "flambeau: tune needs a training"),
        (["--dry-run"], "leave --dry-run out: tune needs a training, whose run it removes"),
        (["--batch-size", "many"], "--batch-size: must be a whole number, 'auto', or 'auto:N'"),
    ],
)
def test_words_that_are_none(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        doctor.command_of(words, verb="tune")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0", "--", "x.py"], "--seconds must be from 0.5 to 3600, got 0"),
        (["--rounds", "0", "--", "x.py"], "--rounds must be from 1 to 100000, got 0"),
        (
            ["--budget", "5", "--", "x.py"],
            "--budget must be a time such as '30s', '5min' or '8h', got '5'",
        ),
        (["--html", "x.pdf", "--", "x.py"], "--html x.pdf: a report is an HTML file"),
        (["--html", "no/x.html", "--", "x.py"], "--html no/x.html: the folder no does not exist"),
        (["--html", "mine.html", "--", "x.py"], "mine.html exists and is no report of flambeau"),
        (["--trace", "x.txt", "--", "x.py"], "--trace x.txt: a time line is a JSON file"),
        (["--trace", "no/x.json", "--", "x.py"], "--trace no/x.json: the folder no does not"),
        (["--no-trials", "--", "no-such.py"], "before its first step"),
        (
            ["--no-trials", "--", "no-such-program"],
            "no-such-program: no such program; what follows -- is a",
        ),
    ],
)
def test_wrong_input(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("<p>mine</p>")
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
    assert Path("mine.html").read_text() == "<p>mine</p>"


@pytest.mark.parametrize("words", ["doctor --no-trials", "doctor --learning"])
def test_an_error_for_programs_is_the_last_line_behind_what_was_said(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('reading')\nraise SystemExit('no photos')\n")
    assert main([*words.split(), "--json", "--", sys.executable, "train.py"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    *progress, last = said.err.splitlines()
    assert progress
    error = json.loads(last)
    assert error["error"].endswith("it said last:\nreading\nno photos")
    assert error["hint"] == f"flambeau {words.split()[0]} --help"
    assert error["exit_code"] == 2


def test_a_script_without_the_dashes_is_told_how_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    with pytest.raises(InputError, match=r"no images: flambeau tune -- python train\.py --lr 1$"):
        doctor.command_of(["train.py", "--lr", "1"], verb="tune")
