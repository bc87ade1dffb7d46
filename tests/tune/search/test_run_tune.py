"""Trials are noted, taken up again, and end as a file that `flambeau train --config` takes."""

import errno
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.data.sources.open_data import open_sources
from flambeau.errors import InputError
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import read_config
from flambeau.tune.doctor.trial import Trial
from flambeau.tune.search.levers import Lever, Setting, TrainFacts, levers_of_train
from flambeau.tune.search.run_tune import FIRST_LINE, Options, PackedCopies, tune, tuned_toml
from flambeau.tune.search.search import SearchResult, Step
from flambeau.tune.watch.plan import Plan
from replaced_trials import answer_of, replace_trials, script

WORKERS = Lever("workers", tuple(Setting(n, words=("--workers", n)) for n in ("0", "2")))
THREADS = Lever("threads", (Setting("1", environment={"OMP_NUM_THREADS": "1"}),))


class Machine:
    """Takes the place of real trials; two workers are twice as fast."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.dies_after = 10**9

    def run(self, command: Sequence[str], plan: Plan, folder: Path) -> Trial:
        if len(self.commands) == self.dies_after:
            raise KeyboardInterrupt
        self.commands.append(list(command))
        words = " ".join(command)
        step_s = 0.1 * (0.5 if "--workers 2" in words else 1.0)
        step_s *= 1 + 0.001 * (len(self.commands) % 3)
        return Trial([{"step_s": step_s, "until_window_s": 1.0, "until_first_s": 4.0}])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    one = Machine()
    replace_trials(monkeypatch, one.run)
    return one


def search(folder: Path, said: list[str]) -> SearchResult:
    return tune(
        script("flambeau", "train"), lambda run: [WORKERS, THREADS], Options(), is_train=True,
        journal=folder / "tuned.jsonl", say=said.append,
    )  # fmt: skip


def test_what_is_chosen_is_a_config_file(machine: Machine, tmp_path: Path) -> None:
    found = search(tmp_path, [])
    assert found.choice == {"workers": "2"}
    assert found.together is not None and found.together.verdict == "faster"
    file = tmp_path / "tuned.toml"
    file.write_text(tuned_toml(found))
    assert read_config(file) == {"workers": 2}
    rows = [json.loads(line) for line in (tmp_path / "tuned.jsonl").read_text().splitlines()]
    assert len(rows) == len(machine.commands)
    assert any(command[:2] == ["env", "OMP_NUM_THREADS=1"] for command in machine.commands)


def test_flags_become_values_of_their_types_that_train_takes(tmp_path: Path) -> None:
    settings = (
        Setting("2", words=("--workers", "2")),
        Setting("32 x 2", words=("--batch-size", "32", "--accumulate", "2")),
        Setting("bf16", words=("--precision", "bf16")),
        Setting("0.5", words=("--ema", "0.5")),
        Setting("yes", words=("--sync-bn", "--no-flip")),
        Setting("1", environment={"OMP_NUM_THREADS": "1"}),
    )
    file = tmp_path / "tuned.toml"
    file.write_text(tuned_toml(SearchResult({}, settings, (), None)))
    told = read_config(file)
    assert told == {
        "workers": 2, "batch_size": 32, "accumulate": 2, "precision": "bf16", "ema": 0.5, "sync_bn": True,
        "flip": False,
    }  # fmt: skip
    assert Settings(**told).batch_size == 32  # which checks the types
    assert file.read_text().endswith(
        "# chosen with them, and to be set by you: OMP_NUM_THREADS=1 flambeau train ...\n"
    )
    file.write_text(tuned_toml(SearchResult({}, settings[:1], (), None), {"workers": 0, "lr": 0.1}))
    assert read_config(file) == {"workers": 2, "lr": 0.1}  # what was in the user's own file stays


def test_a_larger_batch_is_counted_per_sample_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The batch of the first trial is that of its config.toml; twice as large takes 1.5 times as long."""

    def run(command: Sequence[str], plan: Plan, folder: Path) -> Trial:
        words = list(command)
        size = int(words[words.index("--batch-size") + 1]) if "--batch-size" in words else 64
        (folder / "config.toml").write_text(f"batch_size = {size}\naccumulate = 1\nworkers = 0\n")
        lines = [{"train_loss": 2.0, "data_wait": share} for share in (0.5, 0.25, 0.125)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return Trial([{"step_s": 0.05 + size / 1280, "until_window_s": 1.0, "until_first_s": 4.0}])

    replace_trials(monkeypatch, run)
    levers = {one.name: one for one in levers_of_train(
        [], objective="throughput", device=torch.device("cpu"), run=TrainFacts(64)
    )}  # fmt: skip
    asked = []
    found = tune(
        script("flambeau", "train"), lambda run: asked.append(run) or [levers["batch"]], Options(),
        is_train=True, journal=tmp_path / "tuned.jsonl", say=lambda text: None,
    )  # fmt: skip
    assert asked == [TrainFacts(64, 1, 0, 0.125)]
    assert found.choice == {}
    gains = {one.value: one.gain.times for one in found.steps if one.gain is not None}
    assert gains == {"128": pytest.approx(2 * 0.1 / 0.15), "256": pytest.approx(4 * 0.1 / 0.25)}
    assert all("another training" in one.note for one in found.steps)


def test_an_interrupted_search_goes_on(machine: Machine, tmp_path: Path) -> None:
    whole: dict[str, str] = search(tmp_path, []).choice
    count = len(machine.commands)
    for stop in (1, 4, count - 1):
        (tmp_path / "tuned.jsonl").unlink()
        machine.commands.clear()
        machine.dies_after = stop
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path, [])
        with (tmp_path / "tuned.jsonl").open("a") as file:
            file.write('{"key": "cut o')
        machine.dies_after = 10**9
        said: list[str] = []
        assert search(tmp_path, said).choice == whole
        assert len(machine.commands) == count
        assert f"{stop} trials of an earlier call" in said[-1]
        lines = (tmp_path / "tuned.jsonl").read_text()
        assert lines.count('"choice"') == count


def test_another_command_takes_nothing_from_the_file(machine: Machine, tmp_path: Path) -> None:
    search(tmp_path, [])
    count = len(machine.commands)
    tune(
        script("flambeau", "train", "--model", "resnet18"), lambda run: [WORKERS], Options(), is_train=True,
        journal=tmp_path / "tuned.jsonl", say=lambda text: None,
    )  # fmt: skip
    assert len(machine.commands) > count


@pytest.mark.parametrize("word", ["{}", "--config={}"])
def test_an_edited_file_takes_nothing_from_the_file(
    word: str, machine: Machine, tmp_path: Path
) -> None:
    edited = tmp_path / "train.py"
    counts = []
    for text in ("lr = 1", "lr = 1", "lr = 2"):
        edited.write_text(text)
        tune(
            script("python", word.format(edited)), lambda run: [WORKERS], Options(), is_train=False,
            journal=tmp_path / "tuned.jsonl", say=lambda text: None,
        )  # fmt: skip
        counts.append(len(machine.commands))
    assert counts[0] == counts[1] == counts[2] / 2


def test_a_script_that_makes_no_step(machine: Machine, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace_trials(patch, answer_of(Trial([], failure="it said last: no")))
        with pytest.raises(InputError, match="it said last: no"):
            search(tmp_path, [])
    assert search(tmp_path, []).choice == {"workers": "2"}  # what was wrong is put right


def test_the_command_takes_device_and_settings_from_a_file(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('model = "tiny_convnet"\ndevice = "cuda"\n')
    asked: list[torch.device] = []

    def levers(given: Sequence[str], *, device: torch.device, **_: Any) -> Any:
        asked.append(device)
        return [WORKERS]

    monkeypatch.setattr("flambeau.tune.search.levers.levers_of_train", levers)
    assert main(["tune", "--config", "mine.toml"]) == 0
    tuned = {"model": "tiny_convnet", "device": "cuda", "workers": 2}
    assert read_config(Path("tuned.toml")) == tuned
    assert main(["tune", "--config=mine.toml", "--device", "cpu"]) == 0
    assert [device.type for device in asked] == ["cuda", "cpu"]


def test_the_file_is_written_whole_or_not_at_all(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when it comes to it; what an earlier search has chosen stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flambeau.tune.search.levers.levers_of_train", lambda *_, **__: [WORKERS])
    Path("tuned.toml").write_text(before := f"{FIRST_LINE}\nworkers = 7\n")

    def write(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("flambeau.recipes.checkpoints.atomic_checkpoint.os.write", write)
        assert main(["tune"]) == 2
    assert Path("tuned.toml").read_text() == before
    assert main(["tune"]) == 0
    assert read_config(Path("tuned.toml")) == {"workers": 2}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuned.jsonl", "tuned.toml"]


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\n\n"])
def test_train_refuses_an_empty_file_of_settings(
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuned.toml").write_bytes(content)
    assert main(["train", "--config", "tuned.toml", "--dry-run"]) == 2
    assert "--config tuned.toml is empty: write it again" in capsys.readouterr().err
    Path("tuned.toml").write_text(f"{FIRST_LINE}\n")  # of a search that has chosen nothing
    assert read_config(Path("tuned.toml")) == {}


def test_why_a_value_failed_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "the script ended with code 1; it said last:\nTraceback\nValueError: \x1b[31mtoo few"
    steps = tuple(Step("workers", value, None, why) for value in ("0", "2"))
    monkeypatch.setattr(
        "flambeau.tune.search.run_tune.tune", lambda *_, **__: SearchResult({}, (), steps, None)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--", "train.py"]) == 0
    text = capsys.readouterr().out
    assert (
        "workers=0, workers=2: the script ended with code 1; it said last:\n  Traceback\n" in text
    )
    assert "  ValueError: \\x1b[31mtoo few\n" in text and text.count("Traceback") == 1
    assert main(["tune", "--json", "--", "train.py"]) == 0
    assert [one["note"] for one in json.loads(capsys.readouterr().out)["tried"]] == [why, why]


def test_copies_of_a_folder_are_tried_where_the_run_waits_and_only_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Packing is real, the trials are not: from a copy each step takes half as long."""
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        file = Path(f"my photos/{number % 2}/{number}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (20 * number, 0, 0)).save(file)
    read: list[str] = []

    def run(command: Sequence[str], plan: Plan, folder: Path) -> Trial:
        lines = ["batch_size = 8", "accumulate = 1", "workers = 0", "image_size = 28"]
        (folder / "config.toml").write_text("\n".join(lines))
        rows = [{"train_loss": 2.0, "data_wait": 0.5}] * 3
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = command[command.index("train") + 1]
        train, _ = open_sources(Path(data))
        read.append(f"{Image.open(io.BytesIO(train.read(0))).size} {data}")
        step_s = 0.1 if data == "my photos" else 0.05
        return Trial([{"step_s": step_s, "until_window_s": 1.0, "until_first_s": 4.0}])

    replace_trials(monkeypatch, run)
    # A --model of the same name is no DATA, and DATA in the file counts as well as in the command.
    Path("mine.toml").write_text('data = "my photos"\n')
    for words in (["my photos"], ["--config", "mine.toml"]):
        read.clear()
        words += ["--model", "my photos", "--batch-size", "8", "--workers", "0"]
        words += ["--precision", "fp32", "--compile", "none"]
        assert main(["tune", "--json", *words]) == 0
        told = json.loads(capsys.readouterr().out)
        tried = {one["value"]: one for one in told["tried"] if one["lever"] == "packed copy"}
        assert tried.keys() == {"same pixels", "resized to 32"}
        assert all(one["times"] == pytest.approx(2) and not one["chosen"] for one in tried.values())
        note = "faster; flambeau pack 'my photos' 'my photos.tfrecord' --resize 32"
        assert tried["resized to 32"]["note"] == note
        sizes = {line.partition(") ")[0] for line in read if ".tfrecord" in line}
        assert sizes == {"(80, 60", "(42, 32"}
    left = {"my photos", "mine.toml", "tuned.toml", "tuned.jsonl"}
    assert {file.name for file in tmp_path.iterdir()} == left


def test_a_copy_that_cannot_be_made_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    copies = PackedCopies(folder, tmp_path, limit_s=60.0)
    assert str(copies.copy(())).startswith("packing failed: ")  # no image is there
    (folder / "a").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a" / "0.png")
    (folder / "a" / "1.png").write_bytes((folder / "a" / "0.png").read_bytes()[:40])
    damaged = PackedCopies(folder, tmp_path, limit_s=60.0)
    why = str(damaged.copy(("--encode", "jpeg")))
    assert why.startswith(f"packing failed: {folder / 'a' / '1.png'}: ") and "Repair" in why
    (folder / "a" / "1.png").unlink()
    late = PackedCopies(folder, tmp_path, limit_s=0.01)
    assert late.copy(()) == "packing takes more than 0 s"
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100))
    assert PackedCopies(folder, tmp_path, limit_s=60.0).copy(()) == (
        "a copy might take more than 25% of the free disk"
    )
    for one in (copies, damaged, late):
        one.close()
    assert [file.name for file in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "1"], "--rounds must be from 2 to 10, got 1"),
        (["--objective", "fun"], "--objective: invalid choice: 'fun'"),
        (["--modle", "x"], "unknown flag --modle"),
        (["--write", "no/x.toml"], "--write no/x.toml: the folder no does not exist"),
        (["--write", "x.json"], "--write x.json: settings are a TOML file"),
        (["--write", "mine.toml"], "mine.toml is there, and not of flambeau tune"),
        (["--write", "empty.toml"], "empty.toml is there, and empty"),
        (["--write", "photo.toml"], "photo.toml is there, and not of flambeau tune"),
        (["--config", "empty.toml"], "--config empty.toml is empty: write it again"),
    ],
)
def test_wrong_input(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("epochs = 3\n")
    Path("empty.toml").touch()
    Path("photo.toml").write_bytes(b"\xff\xd8\xff")
    assert main(["tune", *words]) == 2
    assert Path("empty.toml").read_bytes() == b""
    assert message in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "epochs = 3\n"


@pytest.mark.slow
def test_a_real_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--budget", "20s", "--rounds", "2", "--json", "--batch-size", "32"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert any(one["times"] for one in told["tried"])
    assert all({"alone", "times", "chosen", "note"} <= one.keys() for one in told["tried"])
    assert main(["train", "--config", "tuned.toml", "--dry-run", "--out", "run"]) == 0
    assert Path("tuned.toml").read_text().startswith(FIRST_LINE)
    rows = [json.loads(line) for line in Path("tuned.jsonl").read_text().splitlines()]
    assert rows and all(row["step_s"] > 0 for row in rows)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuned.jsonl", "tuned.toml"]
