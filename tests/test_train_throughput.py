"""bench/train_throughput.py with contenders that only pretend to train, and what it measures with."""

import io
import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from flambeau.recipes.data.recordio import IRHeader, RecordReader, RecordWriter, pack
from load_script import load_script

BENCH = Path(__file__).resolve().parents[1] / "bench"
CONTENDER = """
import json, os, pathlib, sys, time
job = json.loads(sys.argv[1])
name, mode = job["contender"], "compile" if job["compile"] else "eager"
if name == "timm":
    sys.exit("CUDA out of memory")
if name == "lightning":
    print(os.getpid(), file=open("PIDS", "a"), flush=True)
    time.sleep(600)
now = time.monotonic()
figures = {"window_rates": [100.0, 120.0, 110.0] if name == "bare" else [99.0], "mean_rate": 100.0}
figures |= {"steps": 3, "begin": now - 1, "end": now, "cores": 1.5, "peak_memory": 7, "first_step_s": 1}
pathlib.Path(job["out"]).write_text(json.dumps(figures | {"warmup_s": 1}))
"""
ON_DEVICE = ("--device", "cpu", "--data", "device", "--models", "vit_s16", "--commit", "abc")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)  # as for a script
        return load_script(BENCH / "train_throughput.py")


@pytest.fixture
def out(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the lines, and the pretending contenders in place of the true ones."""
    script = tmp_path / "contender.py"
    script.write_text(CONTENDER.replace("PIDS", str(tmp_path / "pids")))
    monkeypatch.setattr(bench, "CONTENDER", script)
    monkeypatch.setattr(bench, "NEEDS", {})  # they need no peer that is installed
    return tmp_path / "out.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_crash_is_a_line_and_the_others_go_on(bench: ModuleType, out: Path) -> None:
    words = [*ON_DEVICE, "--modes", "eager", "--contenders", "bare,Run,timm", "--out", str(out)]
    assert bench.main(words) == 1
    lines = {line["contender"]: line for line in read(out)}
    assert set(lines) == {"bare", "Run", "timm"}
    assert (lines["bare"]["images_per_s"], lines["bare"]["ratio"]) == (110.0, 1.0)
    assert (lines["Run"]["images_per_s"], lines["Run"]["ratio"]) == (99.0, 0.9)
    assert lines["timm"]["failed"] == "it ended with 1: CUDA out of memory"
    assert lines["timm"]["commit"] == lines["Run"]["commit"] == "abc"


def test_a_second_call_measures_only_what_has_no_line(bench: ModuleType, out: Path) -> None:
    words = [*ON_DEVICE, "--modes", "eager", "--out", str(out)]
    bench.main([*words, "--contenders", "bare"])
    with out.open("a", encoding="utf-8") as file:
        file.write('{"contender": "cut off')
    out.write_text(out.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    bench.main([*words, "--contenders", "bare,Run"])
    bench.main([*words, "--contenders", "bare,Run", "--batch", "8"])  # other figures
    bench.main([*words, "--contenders", "Run", "--again"])
    kept = [line for line in out.read_text(encoding="utf-8").splitlines() if "cut off" not in line]
    found = [(line["contender"], line["batch"]) for line in map(json.loads, kept)]
    assert found == [("bare", 4), ("Run", 4), ("bare", 8), ("Run", 8), ("Run", 4)]


def test_what_is_not_installed_is_named_until_it_is(
    bench: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.NEEDS, "Run", ("nonesuch",))
    words = [*ON_DEVICE, "--modes", "eager", "--contenders", "Run", "--out", str(out)]
    assert [bench.main(words), bench.main(words)] == [0, 0]
    assert [line["skipped"] for line in read(out)] == ["nonesuch is not installed"]
    monkeypatch.undo()
    monkeypatch.setattr(bench, "CONTENDER", out.with_name("contender.py"))
    assert bench.main(words) == 0
    assert read(out)[1]["images_per_s"] == 99.0


def test_it_starts_nothing_that_would_end_after_the_limit(
    bench: ModuleType, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ON_DEVICE, "--contenders", "bare", "--limit", "60", "--out", str(out)]
    assert bench.main(words) == 0
    assert [line["compile"] for line in read(out)] == [False]
    assert "for lack of time: bare, vit_s16, device, compile" in capsys.readouterr().err


def test_the_limit_ends_what_runs_without_a_line(
    bench: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.STARTUP_S, "eager", 0.5)
    words = [*ON_DEVICE, "--modes", "eager", "--contenders", "lightning", "--out", str(out)]
    assert bench.main([*words, "--limit", "2", "--seconds", "0.2"]) == 0
    assert not out.exists()
    assert_ended(out.with_name("pids"))


def assert_ended(pids: Path) -> None:
    for pid in map(int, pids.read_text(encoding="utf-8").split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_contender(
    out: Path, forked_python: Any, number: signal.Signals
) -> None:
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(BENCH)!r}); import train_throughput as bench;"
        f" bench.CONTENDER = pathlib.Path({str(out.with_name('contender.py'))!r}); bench.NEEDS = {{}};"
        f" sys.exit(bench.main({[*ON_DEVICE, '--contenders', 'bare,lightning', '--out', str(out)]!r}))"
    )
    error = out.with_name("error")
    error.touch()
    process = forked_python(["-c", code], output=Path(os.devnull), errors=error)
    pids = out.with_name("pids")
    while not (pids.is_file() and pids.read_text(encoding="utf-8")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == (130 if number == signal.SIGINT else 143)
    assert "Traceback" not in error.read_text(encoding="utf-8")
    assert [line["contender"] for line in read(out)] == ["bare"]
    assert_ended(pids)


def test_the_share_that_kernels_cover() -> None:
    meter = load_script(BENCH / "throughput_meter.py")
    spans = [(10.0, 14.0), (12.0, 13.0), (13.0, 16.0), (18.0, 20.0)]  # 6 + 2 of 10
    assert meter.covered_share(spans) == pytest.approx(0.8)
    assert meter.covered_share([]) is None


def test_a_meter_counts_what_comes_after_the_warm_up(tmp_path: Path, run_python: Any) -> None:
    code = f"""
import sys, time; sys.path.insert(0, {str(BENCH)!r})
import torch
from pathlib import Path
from throughput_meter import Meter, Plan
plan = Plan(batch=10, seconds=0.4, warmup_steps=4, burst=3, profile=False)
meter = Meter(plan, torch.device("cpu"), Path({str(tmp_path / "out")!r}), time.monotonic())
for step in range(1000):
    time.sleep(0.2 if step < 2 else 0.02)
    meter.step()
"""
    assert run_python("-c", code, timeout=60).returncode == 0
    figures = json.loads((tmp_path / "out").read_text(encoding="utf-8"))
    assert figures["steps"] % 3 == 0
    assert len(figures["window_rates"]) >= 4
    assert 20 <= figures["steps"] * 10 / figures["mean_rate"] * 50 <= 10 * figures["steps"]
    assert figures["mean_rate"] <= 500  # 10 images in no less than 0.02 s
    assert figures["first_step_s"] >= 0.2


def test_photographs_are_the_same_for_a_seed_and_differ() -> None:
    photos = load_script(BENCH / "made_photos.py")
    first = photos.photo(0, 3)
    assert first == photos.photo(0, 3)
    assert len({first, photos.photo(0, 4), photos.photo(1, 3)}) == 3
    with Image.open(io.BytesIO(first)) as image:
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert 300 <= max(image.size) <= 1000
    field = photos.texture(photos.np.random.default_rng(0), 256, 256, 1.0)
    power = torch.fft.fft2(torch.from_numpy(field)).abs()[0, 1:128] ** 2
    low, high = power[3:12].mean(), power[48:112].mean()
    assert 30 < low / high < 600  # 1/f^2: (80 / 7)^2 is 130


def test_a_repeated_record_file_has_each_record_as_often(bench: ModuleType, tmp_path: Path) -> None:
    records = [pack(IRHeader(0, float(k), k, 0), bytes(range(5 + k))) for k in range(3)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for key, record in enumerate(records):
            writer.write(record, key)
    bench.repeat_records(tmp_path / "a.rec", tmp_path / "b.rec", 4)
    with RecordReader(tmp_path / "b.rec") as reader:
        assert list(reader) == 4 * records
        assert [reader[k] for k in range(12)] == 4 * records


@pytest.mark.slow
def test_the_true_contenders_give_figures(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--models", "resnet50", "--modes", "eager", "--out", str(out)]
    words += ["--contenders", "bare,Run,train", "--data", "device,packed", "--seconds", "0.5"]
    assert bench.main([*words, "--num-photos", "12", "--workers", "2"]) == 0
    lines = read(out)
    assert sorted((line["data"], line["contender"]) for line in lines) == [
        ("device", "Run"), ("device", "bare"), ("packed", "Run"), ("packed", "train"),
    ]  # fmt: skip
    for line in lines:
        assert line["images_per_s"] > 0
        assert line["ratio"] > 0
        assert line["cores"] > 0.2
