"""`flambeau runs`: what it tells of finished, stopped, running, failed, damaged and foreign folders."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.run import Run

SHORT = "--batch-size 4 --precision fp32 --model tiny_convnet --image-size 16"
CONFIG = (
    'data = "/x/photos"\nmodel = "resnet18"\nduration = "10st"\nbatch_size = 4\naccumulate = 1\nseed = 0\n'
    'checkpoint_every = "5st"\nlr = 0.1\nflip = true\n'
)
FACTS = {
    "classes": ["a", "b"], "channels": 1, "mean": [0.5], "std": [0.25], "train_samples": 40, "val_samples": 4,
    "train_fingerprint": "0" * 64, "val_fingerprint": "1" * 64, "model_file_sha256": None,
    "teacher_sha256": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def photos(folder: Path) -> None:
    for number in range(12):
        for name, color in (("day", "white"), ("night", "black")):
            path = folder / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), color).save(path)


def folder(path: str, files: dict[str, str | bytes] | None = None, config: str = CONFIG) -> Path:
    """A run folder with these files."""
    run = Path(path)
    run.mkdir(parents=True)
    own = {"config.toml": config, "dataset.json": json.dumps(FACTS)}
    for name, content in {**own, **(files or {})}.items():
        file = run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return run


def listed(flambeau: Any, words: str = "") -> dict[str, dict[str, Any]]:
    code, out, _ = flambeau(f"runs --json {words}")
    assert code == 0
    return {row["name"]: row for row in map(json.loads, out.splitlines())}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Let another process hold the lock of a run folder."""
    context = multiprocessing.get_context("fork")
    processes = []

    def hold(path: Path) -> None:
        mine, theirs = context.Pipe()

        def sit() -> None:
            RunFolder(path)._lock.take()
            theirs.send("held")
            time.sleep(120)

        processes.append(context.Process(target=sit))
        processes[-1].start()
        assert mine.recv() == "held"

    yield hold
    for process in processes:
        process.kill()
        process.join()


# ---------------------------------------------------------------- real runs


def test_a_finished_run(flambeau: Any) -> None:
    photos(Path("photos"))
    assert flambeau(f"train photos --epochs 2 {SHORT} --out runs/first").code == 0
    result = json.loads(Path("runs/first/result.json").read_text())
    row = listed(flambeau)["first"]
    assert (row["state"], row["kind"], row["model"]) == ("finished", "train", "tiny_convnet")
    assert row["data"] == str(Path("photos").resolve())
    assert (row["metric"], row["best"]) == ("val_accuracy", result["metrics"]["val_accuracy"])
    assert row["step"] == row["steps"] > 0
    assert row["config"]["batch_size"] == 4
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    samples = json.loads(Path("runs/first/dataset.json").read_text())["train_samples"]
    speeds = [line["images_per_s"] for line in lines if "images_per_s" in line]
    assert row["seconds"] == pytest.approx(sum(samples / speed for speed in speeds))
    text = flambeau("runs").out
    assert re.search(
        r"^first +photos +tiny_convnet +finished +val_accuracy \d\.\d{4} +20\d\d-", text, re.M
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_while_it_trains_and_after_a_signal(
    number: signal.Signals, flambeau: Any, forked_python: Any
) -> None:
    photos(Path("photos"))
    words = f"train photos --duration 100000st --checkpoint-every 3st {SHORT} --out runs/long"
    process = forked_python(["-m", "flambeau", *words.split()], output=Path(os.devnull))
    try:
        until = time.monotonic() + 120
        while not list(Path("runs").glob("long/checkpoints/step-0000000[3-9]")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        row = listed(flambeau)["long"]
        assert (row["state"], row["steps"]) == ("running", 100_000)
        assert row["step"] >= 3
        os.kill(process.pid, number)
        process.wait(60)
    finally:
        process.kill()
    row = listed(flambeau)["long"]
    assert row["state"] == "stopped"
    saved = [int(path.name[5:]) for path in Path("runs/long/checkpoints").glob("step-????????")]
    assert row["step"] == max(saved)
    assert f"stopped, step {max(saved)}/100000" in flambeau("runs").out


def test_a_run_of_a_script(flambeau: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.randn(10, 2), torch.zeros(10, dtype=torch.long))
    run = Run(
        Path("runs/mine"), model, torch.optim.SGD(model.parameters(), lr=0.1), data, duration="2ep",
        batch_size=4, best="val_loss", config={"model": "linear", "hidden": 3},
    )  # fmt: skip
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            run.step(nn.functional.cross_entropy(model(inputs), targets))
        if epoch == 1:  # in this process, whose lock must outlast the question
            assert listed(flambeau)["mine"]["state"] == "running"
            other = [sys.executable, "-m", "flambeau", "runs", "--state", "running"]
            done = subprocess.run(other, capture_output=True, text=True, check=True)
            assert "running, step 6/6" in done.stdout
        for inputs, targets in run.evaluate(data):
            run.log(val_loss=nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
    row = listed(flambeau)["mine"]
    assert (row["kind"], row["data"], row["model"]) == ("script", None, "linear")
    assert (row["state"], row["metric"]) == ("finished", "val_loss")
    assert row["best"] == run.result.metrics["val_loss"]
    assert list(listed(flambeau, "--where hidden=3 --where batch-size=4")) == ["mine"]


# ---------------------------------------------------------------- states


def test_states_of_folders(flambeau: Any, held: Callable[[Path], None]) -> None:
    result = json.dumps({"weights": "best", "step": 5, "metrics": {"val_accuracy": 0.5}})
    folder("runs/new")
    folder("runs/done", {"result.json": result, "model.safetensors": b""})
    folder("runs/gone", {"result.json": result})
    folder("runs/torn", {"result.json": "{"})
    folder("runs/odd", {"result.json": "[1]"})
    folder("runs/nan", {"not-finite-step-00000007.json": "{}", "checkpoints/step-00000005/x": ""})
    folder(
        "runs/mended", {"not-finite-step-00000003.json": "{}", "checkpoints/step-00000005/x": ""}
    )
    folder("runs/bad", config="= 1")
    folder("runs/other", config='[tool]\nname = "x"\n')
    held(
        folder(
            "runs/busy", {"metrics.jsonl": '{"step": 8, "epoch": 0, "val_accuracy": 0.2}\n{"ste'}
        )
    )
    rows = listed(flambeau)
    told = {name: (row["state"], row["step"]) for name, row in rows.items()}
    assert told == {
        "new": ("stopped", 0), "done": ("finished", 0), "gone": ("damaged", 0), "torn": ("damaged", 0),
        "odd": ("damaged", 0), "nan": ("failed", 5), "mended": ("stopped", 5), "bad": ("damaged", None),
        "other": ("foreign", None), "busy": ("running", 8),
    }  # fmt: skip
    assert "model.safetensors is missing" in rows["gone"]["why"]
    assert "result.json" in rows["torn"]["why"] and "config.toml" in rows["bad"]["why"]
    assert rows["nan"]["why"] == "not finite at step 7"
    assert rows["busy"]["best"] == 0.2
    assert rows["done"]["best"] == 0.5
    text = flambeau("runs --state damaged --state foreign").out
    assert len(text.splitlines()) == 1 + 5


def test_best_of_all_lines_and_in_its_direction(flambeau: Any) -> None:
    lines = "".join(f'{{"step": {i}, "epoch": 0, "err": {v}}}\n' for i, v in enumerate((3, 1, 2)))
    folder("runs/a", {"metrics.jsonl": lines}, CONFIG + 'best = "err"\nbest_mode = "min"\n')
    folder("runs/b", {"metrics.jsonl": lines}, CONFIG + 'best = "err"\nbest_mode = "max"\n')
    rows = listed(flambeau)
    assert (rows["a"]["best"], rows["b"]["best"]) == (1, 3)


def test_a_large_metrics_file_is_read_at_its_end(flambeau: Any) -> None:
    run = folder("runs/large")
    with (run / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "epoch": 0, "images_per_s": 5.0}\n')
        file.truncate(2**30)  # 1 GiB, sparse
        file.seek(2**30)
        file.write(b'\n{"step": 9, "epoch": 0, "val_accuracy": 0.25}\n')
    manifest = {"meta": {"step": 5, "epoch": 1, "position": 0, "metrics": {"val_accuracy": 0.75}}}
    saved = run / "checkpoints" / "step-00000005"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    start = time.process_time()  # whatever else the machine does
    row = listed(flambeau)["large"]
    assert time.process_time() - start < 2
    assert row["best"] == 0.75  # the checkpoints remember what is not read
    assert row["seconds"] is None


# ---------------------------------------------------------------- hostile folders


@pytest.mark.parametrize(
    "config",
    [
        b"\xff\xfe", b"a" * 2**19, b"a = " + b"[" * 50_000, b"a." * 5000 + b"a = 1", b"a = " + b"9" * 5000,
        CONFIG.encode() + b"a = 0x" + b"f" * 20_000, b'a = """', b"",
    ],
    ids=["bytes", "large", "nested", "dotted", "digits", "hex", "open", "empty"],
)  # fmt: skip
def test_a_hostile_config_is_one_row(config: bytes, flambeau: Any) -> None:
    folder("runs/evil").joinpath("config.toml").write_bytes(config)
    folder("runs/good")
    rows = listed(flambeau)
    assert rows["evil"]["state"] in ("damaged", "foreign")
    assert rows["good"]["state"] == "stopped"
    assert "evil" in flambeau("runs").out


@pytest.mark.parametrize(
    "more",
    [
        'best = ["a"]', "best = 3", 'config = "x"', "[config]\nmodel = 3\ndata = [1]", "x = nan\ny = inf",
        "z = 2026-11-22", "a = " + "[" * 400 + "]" * 400, '"\\u001b[2J" = 1',
    ],
)  # fmt: skip
def test_odd_values_do_no_harm(more: str, flambeau: Any) -> None:
    folder("runs/odd", config=CONFIG + more + "\n")
    assert listed(flambeau)["odd"]["state"] == "stopped"
    for words in ("runs", "runs --where lr=0.1", "runs --where config=*", "runs --sort best"):
        assert flambeau(words).code in (0, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
        ("[1]", "it is no table"), ('{"classes"', "it is no JSON"), ("", "it is no JSON"),
        (b"\xff\xfe", "it is no JSON"), ("9" * 5000, "a number of thousands of digits"),
        ('{"x": 1}', "no 'channels'"),
        (json.dumps({**FACTS, "class_weights": [1]}), "'class_weights' in it is not what"),
        (json.dumps({**FACTS, "train_samples": "many"}), "'train_samples' in it is not what"),
        (json.dumps({**FACTS, "classes": 5}), "'classes' in it is not what"),
        (json.dumps({**FACTS, "mean": [0.5] * 3}), "'mean' in it is not what"),
        (json.dumps({**FACTS, "std": ["x"]}), "'std' in it is not what"),
        (json.dumps({**FACTS, "val_fingerprint": None}), "'val_fingerprint' in it is not what"),
        (None, "it is missing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_dataset_file_that_cannot_be_read_is_damage(
    state: str, content: str | bytes | None, why: str, flambeau: Any
) -> None:
    done: dict[str, str | bytes] = {}
    if state == "finished":
        done = {"model.safetensors": b"", "result.json": '{"step": 10, "metrics": {}}'}
    run = folder("runs/odd", {**done, "dataset.json": content or ""})
    if content is None:
        (run / "dataset.json").unlink()
    row = listed(flambeau)["odd"]
    assert row["state"] == "damaged"
    assert row["why"].startswith("dataset.json cannot be read: ") and why in row["why"]


def test_the_run_of_a_script_needs_no_dataset_file(flambeau: Any) -> None:
    run = folder("runs/script", config=CONFIG.replace('model = "resnet18"\n', ""))
    (run / "dataset.json").unlink()
    assert listed(flambeau)["script"]["state"] == "stopped"


def test_odd_lines_and_counts_do_no_harm(flambeau: Any) -> None:
    lines = [
        '{"step": -1}',
        '{"step": true}',
        '{"step": "1"}',
        '{"step": 1e5}',
        "[1]",
        "null",
        "[" * 9000,
    ]
    lines += [
        '{"step": 4, "epoch": -1, "images_per_s": 0}',
        '{"step": 9, "epoch": 5, "images_per_s": NaN}',
    ]
    lines += [
        '{"step": 5, "val_accuracy": 1e999}',
        '{"step": 5, "val_accuracy": ' + "9" * 4000 + "}",
    ]
    files = {
        "metrics.jsonl": "\n".join(lines),
        "dataset.json": json.dumps({**FACTS, "train_samples": 0}),
    }
    folder("runs/odd", {**files, "result.json/x": ""}, CONFIG.replace("4", "0"))
    folder("runs/long", files, CONFIG.replace("10st", "9" * 24 + "ep"))
    rows = listed(flambeau)
    assert rows["odd"]["why"] == "result.json cannot be read: it is not a file"
    assert rows["long"]["seconds"] is None and rows["long"]["best"] is None


def test_pipes_and_links_do_not_hang(flambeau: Any) -> None:
    run = folder("runs/odd")
    (run / "dataset.json").unlink()
    for name in ("metrics.jsonl", "result.json", "dataset.json", ".lock"):
        os.mkfifo(run / name)
    (run.parent / "loop").symlink_to(run.parent.resolve())
    (run.parent / "nowhere").symlink_to("missing")
    Path("runs/fifo").mkdir()
    os.mkfifo("runs/fifo/config.toml")
    assert list(listed(flambeau)) == ["odd"]


def test_names_do_not_command_the_terminal(flambeau: Any) -> None:
    folder(
        "runs/a\x1b[2J", config=CONFIG.replace("resnet18", "\\u001b]0;x\\u0007").replace("/x/", "")
    )
    out = flambeau("runs").out
    assert "\x1b" not in out and "\x07" not in out
    assert "a\\x1b[2J" in out


# ---------------------------------------------------------------- which rows, in what order


def three(flambeau: Any) -> None:
    for place, (name, lr, best) in enumerate((("b", 0.1, 0.5), ("a", 0.2, 0.9), ("c", 0.3, None))):
        line = "" if best is None else f'{{"step": 1, "epoch": 0, "val_accuracy": {best}}}\n'
        run = folder(
            f"runs/{name}", {"metrics.jsonl": line}, CONFIG.replace("lr = 0.1", f"lr = {lr}")
        )
        for path in run.iterdir():
            os.utime(path, (place, 10**9 + place))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", "bac"), ("--reverse", "cab"), ("--sort name", "abc"), ("--sort name --reverse", "cba"),
        ("--sort best", "bac"), ("--sort=-best", "abc"), ("--sort=-best --reverse", "bac"),
        ("--where lr=0.2", "a"), ("--where lr=2e-1", "a"), ("--where lr=9", ""), ("--where flip=true", "bac"),
        ("--where model=resnet18 --where lr=0.1", "b"), ("--where 'model=res*'", "bac"),
        ("--where data=photos", "bac"), ("--where data=/x/photos", "bac"), ("--where name=[ab]", "ba"),
        ("--state stopped", "bac"), ("--state finished", ""),
    ],
)  # fmt: skip
def test_order_and_filters(words: str, names: str, flambeau: Any) -> None:
    three(flambeau)
    assert "".join(listed(flambeau, words)) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runs missing", "missing does not exist"),
        ("runs file", "file is not a folder"),
        ("runs --sort accuracy", "unknown column (one of name, data"),
        ("runs --sort nam", "did you mean 'name'?"),
        ("runs --state done", "unknown state (one of finished"),
        ("runs --state finishd", "did you mean 'finished'?"),
        ("runs --where model", "write KEY=VALUE"),
        ("runs --where =3", "write KEY=VALUE"),
        ("runs --where modle=resnet18", "no run here has this setting; did you mean 'model'?"),
        ("runs --jsn", "did you mean '--json'?"),
    ],
)
def test_mistakes_end_with_2(words: str, message: str, flambeau: Any) -> None:
    Path("file").touch()
    folder("runs/a")
    code, out, err = flambeau(words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_no_runs_is_said(flambeau: Any) -> None:
    Path("runs").mkdir()
    code, out, err = flambeau("runs")
    assert (code, out) == (0, "")
    assert "no runs in runs" in err
    folder("runs/a")
    assert "none of the 1 runs in runs" in flambeau("runs --state finished").err


def test_a_run_folder_itself_and_runs_below_folders(flambeau: Any) -> None:
    folder("runs/one/two/three")
    folder("runs/one/two/three/inside")
    folder("runs/.hidden/x")
    folder("runs/1/2/3/4/5/too_deep")
    assert list(listed(flambeau)) == ["one/two/three"]
    assert "not all folders below runs were looked into" in flambeau("runs").err
    assert list(listed(flambeau, "runs/one/two/three")) == ["three"]


# ---------------------------------------------------------------- how it looks, and what it costs


def test_300_runs_without_torch_in_a_pipe() -> None:
    for number in range(300):
        folder(
            f"runs/run-{number:03d}", {"metrics.jsonl": '{"step": 1, "val_accuracy": 0.5}\n' * 100}
        )
    script = """
import sys, time
from flambeau.cli.command import main
assert main(["runs"]) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert time.process_time() < 5, time.process_time()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 301
    assert len({line.index("stopped") for line in lines[1:]}) == 1
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_it_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder("runs/" + "a-long-name-" * 8)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    text = on_terminal("runs")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b[1m" in text
    assert max(map(len, plain.splitlines())) <= columns
    assert "a-long-name-" * 8 in "".join(line.split(" ")[0] for line in plain.splitlines()[1:])
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[3\d", on_terminal("runs --state stopped"))


@pytest.mark.parametrize("columns", [40, 64, 80])
def test_no_word_is_broken_where_the_terminal_is_narrow(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder("runs/one")
    Path("runs/two").mkdir()
    Path("runs/two/config.toml").write_text("x = [", encoding="utf-8")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    text = on_terminal("runs")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= columns
    assert {"resnet18", "damaged:", "document)"} <= set(plain.split())
    assert ("name   one" in plain) == (columns == 40)


def test_before_the_first_run(flambeau: Any) -> None:
    answer = flambeau("runs")
    assert (answer.code, answer.out) == (0, "")
    assert "no runs here: flambeau train makes them in the folder runs" in answer.err


def on_terminal(words: str) -> str:
    """What the command writes to a terminal."""
    import pty

    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "flambeau", *words.split()]
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    chunks = []
    while True:
        try:
            chunks.append(os.read(reader, 2**16))
        except OSError:  # the terminal's other side is closed
            break
        if not chunks[-1]:
            break
    os.close(reader)
    assert process.wait(60) == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


def test_the_runs_of_a_sweep_are_one_row(flambeau: Any) -> None:
    for number, best in ((0, 0.6), (1, 0.9), (2, 0.7)):
        row = json.dumps({"step": 5, "val_accuracy": best})
        folder(f"runs/search/trials/{number:04d}-fold1", {"metrics.jsonl": row + "\n"})
    Path("runs/search/sweep.toml").write_text("trials = 3\n")
    folder("runs/trials/0000")  # of no sweep
    folder("runs/alone")
    done = flambeau("runs")
    rows = {line.split()[0]: line for line in done.out.splitlines()[1:]}
    assert rows.keys() == {"search", "trials/0000", "alone"}
    assert "3 runs: all stopped" in rows["search"]
    assert "val_accuracy 0.9000" in rows["search"]

    Path("runs/search/trials/0001-fold1/config.toml").write_text("[")
    assert "3 runs: 2 stopped, 1 damaged" in flambeau("runs --sort name").out
    assert len(flambeau("runs --json").out.splitlines()) == 5
    for words in ("runs runs/search", "runs runs/search/trials"):
        assert len(flambeau(words).out.splitlines()) == 4
    assert "2 runs: all stopped" in flambeau("runs --where seed=0").out
