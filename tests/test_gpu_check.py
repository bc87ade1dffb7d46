"""tools/gpu_check without a GPU: what it writes of tests and benches that pass, fail, hang and crash."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from load_script import load_script

TOOL = Path(__file__).resolve().parents[1] / "tools" / "gpu_check"
TESTS = """
import os, time, warnings
import pytest

pytestmark = pytest.mark.gpu

def test_passes(): print("{}")
def test_fails(): assert [1] == [2]
@pytest.mark.skipif(True, reason="not today")
def test_is_skipped(): pass
def test_crashes(): os._exit(9)
def test_hangs(): HANG
@pytest.mark.timeout(5)
def test_comes_last(): pass
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


@pytest.fixture(autouse=True)
def _short_grace(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "GRACE_S", 1.0)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_and_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--out", tmp_path / "out.jsonl"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_check: there is no CUDA device here\n"
    assert not (tmp_path / "out.jsonl").exists()


def test_each_test_has_its_line(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS.replace("HANG", "pass"))
    (tmp_path / "test_other.py").write_text("import nonesuch\n")
    out, files = tmp_path / "out.jsonl", [f"{tmp_path}/test_some.py", f"{tmp_path}/test_other.py"]
    assert tool.main(["--device", "cpu", "--commit", "abc", "--out", str(out), *files]) == 1
    lines = read(out)
    found = {Path(line["test"].rpartition("::")[2]).name: line for line in lines}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_other.py": "not imported", "test_passes": "passed", "test_fails": "failed",
        "test_is_skipped": "skipped", "test_crashes": "failed", "test_hangs": "passed",
        "test_comes_last": "passed",
    }  # fmt: skip
    assert len(lines) == len(found)
    assert found["test_other.py"]["why"].endswith("No module named 'nonesuch'")
    assert "test_some.py:8: assert [1] == [2]" in found["test_fails"]["why"]
    assert found["test_is_skipped"]["why"] == "Skipped: not today"
    assert found["test_crashes"]["why"].startswith("its process ended with 9")
    for line in lines:
        assert (line["commit"], line["torch"]) == ("abc", torch.__version__)
        assert line["device"] == line["cpu"]


def test_at_the_limit_it_stops(tool: ModuleType, tmp_path: Path) -> None:
    """Wherever that falls: into the start of pytest or into the test."""
    (tmp_path / "test_some.py").write_text(TESTS.replace("HANG", "time.sleep(600)"))
    start = time.monotonic()
    words = ["--device", "cpu", "--limit", "6", "--out", str(tmp_path / "out.jsonl")]
    code = tool.main([*words, str(tmp_path / "test_some.py")])
    assert time.monotonic() - start < 60
    lines = read(tmp_path / "out.jsonl")
    assert lines[-1]["outcome"] == "stopped at the limit"
    assert code == (1 if any(line["outcome"] == "failed" for line in lines) else 3)


def test_a_test_that_hangs_does_not_take_the_others_along(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        TESTS.replace("HANG", "time.sleep(600)").replace("os._exit(9)", "pass")
    )
    lines: list[dict[str, Any]] = []
    files, deadline = [str(tmp_path / "test_some.py")], time.monotonic() + 150
    tool.run_tests(files, lines.append, deadline=deadline, test_limit_s=3.0)
    found = {line["test"].rpartition("::")[2]: line for line in lines}
    assert found["test_hangs"] == {**found["test_hangs"], "outcome": "failed"}
    assert found["test_hangs"]["why"] == "no end in 3 s"
    assert found["test_comes_last"]["outcome"] == "passed"
    assert len(lines) == len(found) == 6


def test_benches_one_after_the_other(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench that fails, one that ignores SIGTERM and takes no more than its share, and one after it."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "bench").mkdir()
    scripts = {
        "good": 'import sys; print(\'{"n": 1, "on": "%s"}\' % sys.argv[1]); print(\'and so on\')',
        "bad": "raise SystemExit('no such model')",
        "slow": "import signal, time, os\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('{\"pid\": %d}' % os.getpid(), flush=True)\ntime.sleep(600)",
    }
    for name, text in scripts.items():
        (tmp_path / "bench" / f"{name}.py").write_text(text)
    lines: list[dict[str, Any]] = []
    given = [(1.0, "good.py", "{device}"), (1.0, "bad.py", ""), (1.0, "slow.py", "")]
    benches = [tool.Bench(*words) for words in [*given, (9.0, "good.py", "{device}-{seconds}")]]
    deadline = time.monotonic() + 20 + tool.MARGIN_S
    tool.run_benches(benches, lines.append, device="cpu", deadline=deadline)
    own = int(lines[-1]["bench"].rpartition("-")[2])
    for line in lines:
        line.pop("seconds", None)
    pid = next(line["line"]["pid"] for line in lines if "pid" in line.get("line", {}))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert lines == [
        {"bench": "bench good.py cpu", "line": {"n": 1, "on": "cpu"}},
        {"bench": "bench good.py cpu", "outcome": "passed"},
        {"bench": "bench bad.py", "outcome": "failed", "why": "no such model"},
        {"bench": "bench slow.py", "line": {"pid": pid}},
        {"bench": "bench slow.py", "outcome": "stopped at the limit"},
        {"bench": f"bench good.py cpu-{own}", "line": {"n": 1, "on": f"cpu-{own}"}},
        {"bench": f"bench good.py cpu-{own}", "outcome": "passed"},
    ]
    assert 5 <= own <= 20
    tool.run_benches(benches[:1], lines.append, device="cpu", deadline=time.monotonic())
    assert lines[-1] == {"bench": "bench good.py cpu", "outcome": "not run: the time is over"}


def test_a_missing_package_is_named_before_anything_runs(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tool.missing_packages() == []
    needs = ["no-such-package>=1.2", "torch>=2.11", "pillow>=11.3"]
    project = {"project": {"dependencies": needs}}
    monkeypatch.setattr(tool.tomllib, "loads", lambda text: project)
    out = tmp_path / "out.jsonl"
    assert tool.main(["--device", "cpu", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu_check: not installed here: no-such-package>=1.2; fetch the wheels")
    assert "'no-such-package>=1.2')" in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_it_finds_the_marked_files_and_the_benches(tool: ModuleType) -> None:
    names = {Path(file).name for file in tool.gpu_test_files()}
    assert {"test_nccl.py", "test_device_dataset.py", "test_amp_step.py"} <= names
    assert "test_help.py" not in names
    for bench in tool.BENCHES:
        assert (TOOL.parents[1] / "bench" / bench.script).is_file()
    scripts = [bench.script for bench in tool.BENCHES]
    assert scripts[:2] == ["train_throughput.py", "trainer_overhead.py"]
    words = tool.BENCHES[0].words.format(device="cpu", seconds="9", folder="out", commit="abc def")
    assert "--limit 9 " in words
