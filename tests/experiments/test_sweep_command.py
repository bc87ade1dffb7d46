"""`flambeau sweep`, as its user calls it."""

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flambeau
from flambeau.run.folder.pause_file import paused_after
from flambeau.run.folder.summary import saved_place
from flambeau.run.loop.recorder import Recorder
from plain_disks import refuse_links

SCRIPT = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
for name in ("lr", "sleep"):
    parser.add_argument(f"--{name}", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=0)
given = parser.parse_args()
if given.lr > 0.9:
    raise ValueError("the rate is too high")
with pathlib.Path("starts.txt").open("a") as file:
    file.write(f"{given.lr}\\n")
time.sleep(given.sleep)
print("not JSON")
print(json.dumps({"val_accuracy": 1 - (given.lr - 0.3) ** 2 + given.seed / 100}))
"""
RUN_SCRIPT = """
import argparse, json, torch
from flambeau import Run
parser = argparse.ArgumentParser()
for name in ("lr", "silent"):
    parser.add_argument(f"--{name}", type=float, default=0.0)
parser.add_argument("--out")
given = parser.parse_args()
points = torch.ones(8, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
data = torch.utils.data.TensorDataset(points)
run = Run(given.out, model, optimizer, data, duration="2ep", best="val_loss", bar=False)
for _ in run.epochs():
    for (batch,) in run.batches():
        run.step(model(batch).square().mean())
    for (batch,) in [] if given.silent else run.evaluate(data):
        run.log(val_loss=model(batch).square().mean())
print(json.dumps({"val_score": given.lr}))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "curve.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of twelve dark and twelve bright images."""
    pixels = np.random.default_rng(0)
    for number, name in enumerate(("dark", "bright")):
        place = tmp_path / "images" / name
        place.mkdir(parents=True)
        for index in range(12):
            levels = pixels.integers(0, 120, (16, 16, 3), dtype=np.uint8) + 100 * number
            Image.fromarray(levels.astype(np.uint8)).save(place / f"{index}.png")
    return tmp_path / "images"


def rates(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def test_a_script_is_searched_and_the_sweep_goes_on_where_it_was(
    flambeau: Any, script: Path
) -> None:
    flags = "--set lr=0..0.8 --trials 6 --out found"
    behind = f"-- {sys.executable} curve.py --lr {{lr}}"
    done = flambeau("sweep", flags, behind)
    assert done.code == 0
    assert "best: trial" in done.out
    first = rows(Path("found"))
    assert sum("trial" in row for row in first) == 6

    again = flambeau("sweep", flags, behind)
    assert again.code == 0
    assert "going on after 6 results" in again.err
    assert rows(Path("found")) == first
    assert len(Path("starts.txt").read_text().splitlines()) == 6

    more = flambeau("sweep", flags.replace("6", "8"), behind)
    assert more.code == 0
    assert rows(Path("found"))[:12] == first
    assert len(Path("starts.txt").read_text().splitlines()) == 8

    other = flambeau("sweep", flags.replace("0.8", "0.7"), behind)
    assert other.code == 2
    assert "holds a sweep with another --set lr (0.0..0.8; now 0.0..0.7)" in other.err
    values = flambeau("sweep", flags.replace("0..0.8", "0.1,0.2"), behind)
    assert "with another --set lr (0.0..0.8; now 0.1,0.2)" in values.err
    assert len(rows(Path("found"))) == 16


def test_trials_at_once_have_a_gpu_each(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(
        "import json, os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while len([*pathlib.Path().glob('0.*')]) < 2: time.sleep(0.01)\n"  # the others run, too
        "print(json.dumps({'val_accuracy': 0.5}))\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    behind = f"-- {sys.executable} job.py {{lr}}"
    done = flambeau("sweep", "--set lr=0.1,0.2,0.3,0.4 --sampler grid --out found", behind)
    assert done.code == 0, done.err
    gpus = sorted(path.read_text() for path in Path().glob("0.*"))
    assert len(gpus) == 4
    assert set(gpus) == {"4", "7"}

    alone = flambeau("sweep", "--set lr=0.5 --procs 1 --out one", behind)
    assert alone.code == 0, alone.err
    assert Path("0.5").read_text() == "4,7"


def test_a_disk_error_in_the_log_of_optuna_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna's own locks said "did not possess lock", as a traceback."""
    pytest.importorskip("optuna")
    from flambeau.experiments.optuna_log import write_optuna_log

    def fails(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for name in ("rename", "fsync"):
        monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="Stale") as refusal:
        write_optuna_log(tmp_path / "optuna.log", {}, [], mode="max")
    assert refusal.value.filename == str(tmp_path / "optuna.log")


def test_optuna_reads_the_log(flambeau: Any, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is written also where a disk has no links, as exFAT: Optuna's own lock is one."""
    optuna = pytest.importorskip("optuna")
    behind = f"-- {sys.executable} curve.py --lr {{lr}}"
    with monkeypatch.context() as disk:
        refuse_links(disk)
        done = flambeau("sweep", "--set lr=0..0.8 --trials 5 --out found", behind)
    assert done.code == 0, done.err
    backend = optuna.storages.journal.JournalFileBackend("found/optuna.log")
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    ours = {row["step"]: row["value"] for row in rows(Path("found")) if "value" in row}
    assert [trial.value for trial in study.trials] == [ours[number] for number in range(5)]
    assert study.best_value == max(ours.values())


def test_seeds_have_a_spread(flambeau: Any, script: Path) -> None:
    behind = f"-- {sys.executable} curve.py --lr {{lr}} --seed {{seed}}"
    done = flambeau("sweep", "--set lr=0.3,0.31 --seeds 3 --out found", behind)
    assert done.code == 0
    assert "no difference seen" not in done.out  # every pair differs by the same
    assert "95 % by Student's t over 3 seeds" in done.out
    values = [
        row["value"] for row in rows(Path("found")) if row.get("step") == 0 and "value" in row
    ]
    assert sorted(values) == pytest.approx([1.0, 1.01, 1.02], abs=2e-4)


def test_the_figure_of_a_script_with_a_run(flambeau: Any, script: Path) -> None:
    Path("own.py").write_text(RUN_SCRIPT)
    flags = "--set lr=0.05,0.4 --sampler grid"
    behind = f"-- {sys.executable} own.py --lr {{lr}} --out {{out}}"
    other = flambeau("sweep", flags, "--out other", behind)
    assert other.code == 2
    assert "its Run chooses by val_loss, and the sweep compares val_accuracy" in other.err
    assert all("member" not in row for row in rows(Path("other")))
    same = flambeau("sweep", flags, "--figure val_loss --out same", behind)
    assert same.code == 0
    values = [row["value"] for row in rows(Path("same")) if "member" in row]
    assert f"best: trial {values.index(min(values))} " in same.out
    printed = flambeau("sweep", flags, "--figure val_score --out printed", behind, "--silent 1")
    assert printed.code == 0  # a Run that evaluates nothing, and a line of JSON
    found = {row["step"]: row["value"] for row in rows(Path("printed")) if "member" in row}
    assert found == {0: 0.05, 1: 0.4}


def test_some_failures_are_results_and_only_failures_an_error(flambeau: Any, script: Path) -> None:
    behind = f"-- {sys.executable} curve.py --lr {{lr}}"
    some = flambeau("sweep", "--set lr=0.95,0.5,0.2 --sampler grid --out some", behind)
    assert some.code == 0
    assert "failed: exit code 1: ValueError: the rate is too high" in some.err
    reasons = [row.get("reason") for row in rows(Path("some")) if "member" in row]
    assert sum(reason is not None for reason in reasons) == 1

    none = flambeau("sweep", "--set lr=0.95,0.97 --out none", behind)
    assert none.code == 2
    assert "ValueError: the rate is too high" in none.err
    assert all("member" not in row for row in rows(Path("none")))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "nothing to compare"),
        ("--set lr", "give NAME=LOW..HIGH"),
        ("--set lrr=1,2", "unknown setting 'lrr'; did you mean 'lr'?"),
        ("--set lr=-1,0.1", "--set lr=-1: lr must be above 0"),
        ("--set augment=none,foo", "--set augment=foo: augment must be one of"),
        ("--set model=tiny_convnet,resnet999", "--set model=resnet999: unknown model 'resnet999'"),
        ("--set model=tiny_convnet,torchvision:net", "unknown model 'torchvision:net'"),
        ("--set subset=10%,130%", "--set subset=1.3: subset must be above 0 and at most 1"),
        ("--set lr=1,2 --lr 3", "lr is searched, and given as well"),
        ("--set lr=1..2 --sampler grid", "--sampler grid needs values, and lr is a range"),
        ("--set lr=1..2 --sampler best", "--sampler must be one of"),
        ("--set seed=1,2", "seed cannot be searched; --seeds 3"),
        ("--set workers=1,2", "it changes no figure"),
        ("--set epochs=1,2 --halving", "epochs cannot be searched with halving"),
        ("--set lr=1..2 --seeds 0", "seeds must be from 1"),
        ("--folds 1", "folds must be from 2"),
        ("--folds 3 --fold 1/3", "fold is one of them, and folds are all"),
        ("--set lr=1..2 --fresh", "leave --fresh out"),
        ("--set lr=1..2 nowhere", "nowhere does not exist"),
        ("--set lr=1..2 --", "nothing to run behind --"),
        ("--set lr=1..2 -- python curve.py", "the command has no {lr} in it"),
        ("--set lr=1..2 --seeds 2 -- python curve.py {lr}", "the command has no {seed}"),
        ("--set lr=1..2 --halving -- python curve.py {lr}", "halving a script needs --epochs"),
        ("--set lr=1..2 --figure strange -- python curve.py {lr}", "give --mode max or --mode min"),
    ],
)
def test_wrong_input(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = flambeau("sweep", words)
    assert answer.code == 2
    assert why in answer.err
    assert not any(tmp_path.iterdir())


def test_a_line_that_is_not_of_a_sweep(flambeau: Any, script: Path) -> None:
    behind = f"-- {sys.executable} curve.py --lr {{lr}}"
    flambeau("sweep", "--set lr=0.1,0.2 --out found", behind)
    journal = Path("found/sweep.jsonl")
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])  # torn by a kill: the last result is made again
    assert flambeau("sweep", "--set lr=0.1,0.2 --out found", behind).code == 0
    assert len(rows(Path("found"))) == 4
    for before, after in (
        (b'"trial": 1', b'"trial": -1'),
        (b'"rung": 0', b'"rung": 7'),
        (b'{"lr": 0.2}', b'{"lr": 0.3}'),  # no value of the search
        (b'{"lr": 0.2}', b'{"lr": 0.2, "model": "elsewhere.py:f"}'),  # code that no one has named
        (b'{"lr": 0.2}', b'{"model": "elsewhere.py:f"}'),
    ):
        assert before in whole
        journal.write_bytes(whole.replace(before, after))
        answer = flambeau("sweep", "--set lr=0.1,0.2 --out found", behind)
        assert answer.code == 2
        assert "it is not what a sweep writes" in answer.err


def test_a_dry_run_says_trials_time_and_disk(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "--set lr=1e-3..1:log --model tiny_convnet --batch-size 4 --epochs 9 --halving --trials 9"
    )
    done = flambeau("sweep", images, flags, "--folds 3 --dry-run")
    assert done.code == 0, done.err
    assert "9 trials, in runs/images-" in done.out
    assert "63 epochs in all\nwithout halving it were 243" in done.out
    found = re.search(r"takes ([\d.e-]+), ([\d.e-]+), ([\d.e-]+) s here", done.out)
    assert found
    seconds = 63 * sum(map(float, found.groups())) / 3
    clock = re.search(r"time: about (\d+):(\d\d)", done.out)
    assert clock
    assert 60 * int(clock[1]) + int(clock[2]) == pytest.approx(seconds, abs=1)
    disk = re.search(r"disk: at most (\d+) MiB", done.out)
    assert disk
    assert [one.name for one in tmp_path.iterdir()] == ["images"]
    assert flambeau("train", images, "--model tiny_convnet --epochs 3 --out run").code == 0
    files = [file for file in Path("run").rglob("*") if file.suffix in (".safetensors", ".pt")]
    written = 27 * sum(file.stat().st_size for file in files)
    assert written < int(disk[1]) * 2**20 < 2 * written


def test_a_dry_run_names_the_trials_that_will_fail(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--model tiny_convnet --batch-size 4 --epochs 1 --sampler grid --dry-run"
    some = flambeau("sweep", images, "--set drop_path=0,0.2", flags)
    assert some.code == 0, some.err
    assert "a trial will fail with drop_path=0.2: drop_path = 0.2 has no effect" in some.out
    assert re.search(r"takes [\d.e-]+ s here", some.out)
    none = flambeau("sweep", images, "--set drop_path=0.1,0.2", flags)
    assert none.code == 2
    assert "with drop_path=0.1: drop_path = 0.1 has no effect" in none.err


def test_a_folder_that_holds_something_else_stays_as_it_is(flambeau: Any, script: Path) -> None:
    behind = f"-- {sys.executable} curve.py --lr {{lr}}"
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    for out, why in (("mine", "holds 'notes.txt', and no sweep"), ("file", "is no folder")):
        answer = flambeau("sweep", f"--set lr=0.1,0.2 --out {out}", behind)
        assert answer.code == 2
        assert why in answer.err
    assert [one.name for one in Path("mine").iterdir()] == ["notes.txt"]


def test_a_sweep_is_not_made_within_its_data(flambeau: Any, images: Path) -> None:
    answer = flambeau("sweep", images, "--set lr=0.1,0.2 --out", images / "sweep")
    assert answer.code == 2
    assert "would lie within the data" in answer.err
    assert sorted(one.name for one in images.iterdir()) == ["bright", "dark"]


def test_a_killed_sweep_goes_on_with_the_same_trials(script: Path) -> None:
    """SIGKILL of the command and of its workers, in turn, until all is done."""
    behind = [sys.executable, "curve.py", "--lr", "{lr}", "--sleep", "0.3"]
    flags = ["--set", "lr=0..0.8", "--trials", "6", "--procs", "2"]

    def start(out: str) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "flambeau", "sweep", *flags, "--out", out, "--", *behind]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("calm").wait() == 0
    for _ in range(4):
        process = start("storm")
        time.sleep(1.2)
        if process.poll() is None:
            process.kill()
        process.wait()
    assert start("storm").wait() == 0

    def facts(folder: str) -> list[Any]:
        found = rows(Path(folder))
        steps = [row for row in found if "trial" in row]
        return [steps, sorted((row["step"], row["value"]) for row in found if "member" in row)]

    assert facts("storm") == facts("calm")


def test_ctrl_c_ends_with_75(script: Path) -> None:
    behind = [sys.executable, "curve.py", "--lr", "{lr}", "--sleep", "60"]
    words = [
        sys.executable,
        "-m",
        "flambeau",
        "sweep",
        "--set",
        "lr=0..0.8",
        "--out",
        "found",
        "--",
    ]
    for starts in (1, 2):  # a script that knows no checkpoint has not failed: it begins again
        process = subprocess.Popen([*words, *behind], stderr=subprocess.PIPE, text=True)
        while not (Path("starts.txt").exists() and len(rates("starts.txt")) == starts):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 75
        assert "the same command goes on" in said
        assert all("member" not in row for row in rows(Path("found")))
    assert len({*rates("starts.txt")}) == 1


def test_a_run_pauses_after_epochs_and_goes_on_to_the_same_bits(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "tiny_convnet", "epochs": 3, "batch_size": 8, "bar": False}

    def train(name: str) -> bytes:
        flambeau.train(images, out=tmp_path / name, **settings)  # type: ignore[arg-type]
        return (tmp_path / name / "model.safetensors").read_bytes()

    whole = train("whole")
    for epochs in (1, 1, 2):
        monkeypatch.setenv("FLAMBEAU_PAUSE_AFTER", str(epochs))
        with pytest.raises(flambeau.Preempted):
            train("paused")
        assert paused_after(tmp_path / "paused") == epochs
    monkeypatch.setenv("FLAMBEAU_PAUSE_AFTER", "3")  # where it ends anyway
    assert train("paused") == whole
    monkeypatch.setenv("FLAMBEAU_PAUSE_AFTER", "soon")
    with pytest.raises(
        flambeau.InputError, match="FLAMBEAU_PAUSE_AFTER must be a number of epochs"
    ):
        train("other")


def test_a_pause_saves_however_little_time_a_stop_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "has_time_to_save", lambda *_, **__: False)
    monkeypatch.setenv("FLAMBEAU_PAUSE_AFTER", "2")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    run = flambeau.Run(
        tmp_path / "run", model, optimizer, data, duration="4ep", checkpoint_every="4ep", bar=False
    )
    with pytest.raises(flambeau.Preempted):
        for _ in run.epochs():
            for (points,) in run.batches():
                run.step(model(points).square().mean())
    assert saved_place(tmp_path / "run") == (2, 0)


@pytest.mark.slow
def test_halving_over_folds_has_the_bits_of_trainings_alone(images: Path, tmp_path: Path) -> None:
    space = {"lr": [0.3, 0.01, 1e-5]}
    settings = {"model": "tiny_convnet", "epochs": 4, "batch_size": 8}
    out = tmp_path / "sweep"
    result = flambeau.sweep(
        images, space=space, out=out, sampler="grid", halving=2, folds=3, at_once=2, **settings
    )
    best = result.best
    assert best is not None
    assert best.spread is not None
    assert [trial.state for trial in result.trials].count("halved") >= 1
    assert all(len(trial.values) == 3 for trial in result.trials)
    alone = tmp_path / "alone"
    flambeau.train(images, out=alone, fold="2/3", bar=False, **best.settings, **settings)  # type: ignore[arg-type]
    assert best.runs[1].name.endswith("fold2")
    weights = (best.runs[1] / "model.safetensors").read_bytes()
    assert weights == (alone / "model.safetensors").read_bytes()
    figures = json.loads((alone / "result.json").read_text())["metrics"]
    assert best.values[1] == figures[result.figure]
    assert (out / "best.toml").exists()
    text = (out / f"out_of_fold-{best.number:04d}.csv").read_text(encoding="utf-8")
    held = list(csv.DictReader(text.splitlines()))
    assert len({row["path"] for row in held}) == len(held) == 24
    right = [row["label"] == row["predicted"] for row in held if row["fold"] == "2/3"]
    assert sum(right) / len(right) == pytest.approx(figures["val_accuracy"])
    written = json.loads((out / "figures.json").read_text())[str(best.number)]["figures"]
    assert written["val_accuracy"]["values"][1] == figures["val_accuracy"]
    assert {"val_loss", "val_accuracy"} <= written.keys()
