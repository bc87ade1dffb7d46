"""`flambeau report`: one run, several, a folder of runs; what is there already; wrong input."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.recipes.checkpoints.atomic_checkpoint import remove_leftovers
from flambeau.report.words import ENGLISH
from flambeau.run.folder.report_file import write_page


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, kept_process: Any, every_tenth_embedded: Path
) -> Path:
    from flambeau.cli.command import main

    folder = tmp_path_factory.mktemp("runs") / "first"
    words = "--duration 2ep --batch-size 150 --device cpu --precision fp32 --log-every 2"
    with kept_process(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("flambeau.data.sources.open_data.EMBEDDED", every_tenth_embedded)
        assert main(["train", "--out", str(folder), *words.split()]) == 0
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Three runs: two that differ in their seed, one with another rate."""
    for name, change in (
        ("first", ("", "")),
        ("second", ("seed = 0", "seed = 1")),
        ("third", ("momentum = 0.9", "momentum = 0.8")),
    ):
        shutil.copytree(trained, tmp_path / "runs" / name)
        config = tmp_path / "runs" / name / "config.toml"
        text = config.read_text(encoding="utf-8")
        assert change[0] in text
        config.write_text(text.replace(*change), encoding="utf-8")
    return tmp_path / "runs"


def embedded(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def test_a_run_gets_its_report(flambeau: Any, runs: Path) -> None:
    run = runs / "first"
    out = flambeau("report", run).out
    assert out == f"{run / 'report.html'}\n"
    assert (run / "report.html").stat().st_mode & 0o777 == 0o644
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<title>first</title>" in page
    assert "step: 8/8" in page
    charts = {chart["title"]: chart["lines"] for chart in embedded(run / "report.html")["charts"]}
    assert [*charts][:2] == ["loss", "accuracy"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (val,) = (line for line in charts["loss"] if line["name"].endswith("val_loss"))
    assert val["values"] == [row["val_loss"] for row in rows if "val_loss" in row]
    assert val["epochs"] == [1.0, 2.0]
    for name in ("momentum", "torch_threads", "train_samples"):
        assert re.search(
            rf'<th scope="row">{name}</th>', page.replace("torch threads", "torch_threads")
        )
    result = json.loads((run / "result.json").read_text())["metrics"]["val_accuracy"]
    assert f"{result:.5g}" in page


def test_a_folder_of_runs(
    flambeau: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flambeau("report", "runs").out == "report.html\n"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>Report: 3 runs</title>" in page
    lines = embedded(tmp_path / "report.html")["charts"][0]["lines"]
    assert {line["name"].partition(" ")[0] for line in lines} == {"first", "third"}
    assert sum("n = 2" in line["name"] for line in lines) == 2
    assert flambeau("report", "runs/second", "runs", "--out", "again.html").code == 0
    assert "Report: 3 runs" in (tmp_path / "again.html").read_text(encoding="utf-8")


def test_chinese(flambeau: Any, runs: Path) -> None:
    assert flambeau("report", runs / "first", "--zh").code == 0
    assert '<html lang="zh">' in (runs / "first" / "report.html").read_text(encoding="utf-8")


def test_a_report_is_replaced_and_nothing_else(flambeau: Any, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("<p>mine</p>")
    code, _, err = flambeau("report", runs, "--out", out)
    assert code == 2
    assert "exists and is no report of flambeau; --force replaces it" in err
    assert out.read_text() == "<p>mine</p>"
    assert flambeau("report", runs, "--out", out, "--force").code == 0
    assert flambeau("report", runs / "first", "--out", out).code == 0
    assert "<title>first</title>" in out.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".report")] == []


def test_a_run_that_goes_on_or_is_damaged_has_one_too(flambeau: Any, runs: Path) -> None:
    run = runs / "first"
    (run / "result.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train_loss": 0.')
    (run / "environment.json").write_text("[" * 100_000)
    (run / "dataset.json").write_text('{"classes": "<b>"}')
    assert flambeau("report", run).code == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "damaged: dataset.json cannot be read" in page
    assert "<b>" not in page
    (run / "metrics.jsonl").unlink()
    assert flambeau("report", run).code == 0
    assert "no line of metrics.jsonl can be read yet" in (run / "report.html").read_text()


def test_a_folder_whose_name_is_no_text(flambeau: Any, runs: Path) -> None:
    odd = runs / os.fsdecode(b"caf\xe9")
    (runs / "first").rename(odd)
    assert flambeau("report", odd).code == 0
    assert "<title>caf\\xe9</title>" in (odd / "report.html").read_text(encoding="utf-8")
    assert flambeau("report", runs, "--out", runs / "all.html").code == 0
    (box,) = re.findall(r'data-run="(caf[^"]*)"', (runs / "all.html").read_text(encoding="utf-8"))
    lines = embedded(runs / "all.html")["charts"][0]["lines"]
    assert box in {line["run"] for line in lines}


def test_a_disk_that_fails_is_told_with_the_file(
    flambeau: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (runs / "first" / "report.html").unlink()  # of the training
    monkeypatch.setattr(Path, "replace", full)
    code, _, err = flambeau("report", runs / "first")
    assert code == 2
    assert "first/report.html: No space left on device" in err
    assert [path.name for path in (runs / "first").glob("*report*")] == []


def test_what_a_kill_leaves_of_a_report_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        write_page(tmp_path / "report.html", "text")
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "text"
    assert remove_leftovers(tmp_path) == [left]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RUNS --watch 70000", r"--watch 70000: a port is a number from 1 to 65535"),
        (
            "RUNS --watch --out a.html",
            r"--watch writes no file: leave out --out, --force and --json",
        ),
        ("RUNS/absent", r"RUNS/absent does not exist; name the folder of a run"),
        ("RUNS/first/config.toml", r"config.toml is not a folder"),
        ("RUNS/first/checkpoints", r"no runs in RUNS/first/checkpoints"),
        ("RUNS --out x.pdf", r"--out x.pdf: a report is an HTML file"),
        ("RUNS --out x.pdf --force", r"--out x.pdf: a report is an HTML file"),
        ("RUNS --out no/x.html", r"--out no/x.html: the folder no does not exist"),
        ("RUNS --out RUNS/x.html", r"--out \S+/x.html is a folder; name a file in it: "),
        ("RUNS --out RUNS/x.html --force", r"--out \S+/x.html is a folder; name a file in it: "),
        ("", r"RUN is missing; see flambeau report --help"),
    ],
)
def test_wrong_input(flambeau: Any, runs: Path, words: str, said: str) -> None:
    (runs / "x.html").mkdir()
    code, out, err = flambeau(f"report {words.replace('RUNS', str(runs))}")
    assert (code, out) == (2, "")
    assert re.search(said.replace("RUNS", re.escape(str(runs))), err), err


# ---------------------------------------------------------------- what the training writes itself


def test_the_training_has_written_it(trained: Path) -> None:
    page = (trained / "report.html").read_text(encoding="utf-8")
    for name in (
        "pictures",
        "confusion",
        "classes",
        "calibration",
        "first_batch",
        "events",
        "model",
    ):
        assert f'<h2 id="h-{name}">' in page
    found = json.loads((trained / "evaluation.json").read_text(encoding="utf-8"))
    result = json.loads((trained / "result.json").read_text(encoding="utf-8"))
    assert found["step"] == result["step"]
    assert sum(found["right"]) / found["images"] == result["metrics"]["val_accuracy"]
    assert page.count("data:image/jpeg") == 1 + len(found["mistakes"]) + len(found["unsure"])
    assert found["suspects"] == []  # after two epochs a model believes few labels
    assert "finished: the best weights" in page
    assert len(page) < 3_000_000


def test_a_report_of_several_leads_to_that_of_each(flambeau: Any, runs: Path) -> None:
    other = runs / "javascript:alert(1) <b>"
    (runs / "third").rename(other)
    (runs / "second" / "report.html").unlink()
    out = runs.parent / "all.html"
    assert flambeau("report", runs, "--out", out).code == 0
    page = out.read_text(encoding="utf-8")
    links = re.findall(r'<a href="(\./[^"]+)">', page)
    assert links == [
        "./runs/first/report.html", "./runs/javascript%3Aalert%281%29%20%3Cb%3E/report.html",
    ]  # fmt: skip
    assert all((out.parent / urllib.parse.unquote(link)).is_file() for link in links)


@pytest.mark.parametrize(
    "name", ["evaluation.json", "events.jsonl", "first_batch.jpg", "bad_images.txt"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"[" * 100_000, b'{"text": 1}\n'])
def test_a_file_that_is_none_of_ours_is_left_out(
    flambeau: Any, runs: Path, name: str, content: bytes
) -> None:
    (runs / "first" / name).write_bytes(content)
    assert flambeau("report", runs / "first").code == 0
    (runs / "first" / name).unlink()
    (runs / "first" / name).mkdir()
    assert flambeau("report", runs / "first").code == 0


def test_a_report_that_cannot_be_made_ends_no_training(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("flambeau.run.folder.report_file.report_page", broken)
    out = tmp_path / "run"
    code, _, err = flambeau("train", images, "--epochs 1 --batch-size 4 --out", out)
    assert code == 0
    assert f"{out}/report.html could not be written: ZeroDivisionError: a fault of ours" in err
    assert (out / "result.json").is_file()


def test_a_finished_run_that_lost_its_report_gets_it_again(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed between its result and its report."""
    monkeypatch.chdir(tmp_path)
    command = ("train", images, "--epochs 1 --batch-size 4 --out run")
    assert flambeau(*command).code == 0
    report, left = Path("run/report.html"), Path("run/.report.html.0123456789abcdef.tmp")
    page = report.read_text(encoding="utf-8")
    assert "finished: the best weights" in page
    report.unlink()
    assert flambeau(*command).code == 0
    assert report.read_text(encoding="utf-8") == page
    # Or an earlier process, which was stopped, had written one.
    report.write_text(page.replace("finished", "stopped"), encoding="utf-8")
    os.utime(report, ns=(0, 0))
    left.touch()
    assert flambeau(*command).code == 0
    assert report.read_text(encoding="utf-8") == page
    assert not left.exists()


def test_it_is_written_without_torch(runs: Path) -> None:
    code = (
        "import sys; from flambeau.cli.command import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", str(runs / "first")], check=False)
    assert done.returncode == 0


def test_somebody_elses_report_stays(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("train", images, "--epochs 2 --batch-size 4 --out run")
    assert flambeau(*command).code == 0
    Path("run/report.html").write_text("<p>mine</p>")
    assert flambeau(*command, "--extend 1ep").code == 0
    assert Path("run/report.html").read_text() == "<p>mine</p>"


def test_what_is_free_of_the_data_check_stands_in_it(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flambeau("train", images, "--epochs 1 --batch-size 4 --out even").code == 0
    assert ENGLISH["check"] not in Path("even/report.html").read_text(encoding="utf-8")
    first, *_ = sorted(path for path in (images / "val").iterdir() if path.is_dir())
    shutil.rmtree(first)
    assert flambeau("train", images, "--epochs 1 --batch-size 4 --out uneven").code == 0
    page = Path("uneven/report.html").read_text(encoding="utf-8")
    assert "<li>The classes are uneven<br>" in page and f"{first.name}: none to validate on" in page


def test_labels_that_look_wrong_are_shown(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for part, num in (("train", 24), ("val", 4)):
        for name, value in (("dark", 40), ("light", 200)):
            (folder := Path("data", part, name)).mkdir(parents=True)
            for k in range(num):
                wrong = part == "train" and name == "dark" and k == 7
                pixels = generator.normal(200 if wrong else value, 20, (16, 16, 3)).clip(0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k}.png")
    flags = "--epochs 8 --batch-size 8 --lr 0.05 --image-size 16 --out run"
    assert flambeau("train", "data", flags).code == 0
    found = json.loads(Path("run/evaluation.json").read_text(encoding="utf-8"))
    first = found["suspects"][0]
    assert first["image"].endswith("dark/7.png") and first["of_label"] < 0.5
    assert found["classes"][first["predicted"]] == "light"
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert first["picture"] in page and "<span>light; label: dark " in page


def test_it_is_watched_until_ctrl_c(runs: Path) -> None:
    code = (  # a test run in the background ignores SIGINT, and so would its child
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from flambeau.cli.command import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "report", str(runs / "first"), "--watch"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://localhost:\d+/", address)
        with urllib.request.urlopen(address, timeout=300) as answer:
            page = answer.read().decode()
        assert "<title>first</title>" in page and "connect-src 'self'" in page
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
