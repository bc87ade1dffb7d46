"""The jobs of bench/doctor_jobs are well-formed, and bench/doctor.py judges answers about them.

No job is run here: a stand-in takes the place of one, and of the doctor.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from load_script import load_script

BENCH = Path(__file__).resolve().parents[1] / "bench"
JOBS = sorted(path for path in (BENCH / "doctor_jobs").glob("*.py") if path.stem != "job")
LEVERS = {
    "workers=N", "persistent workers", "fused optimizer", "threads=N", "skip waiting calls",
    "channels_last", "bf16", "compile", "no anomaly mode", "fast(loader)", "cached batches",
    "one loader",
}  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)  # it imports its neighbor
    return load_script(BENCH / "doctor.py")


@pytest.mark.parametrize("path", JOBS, ids=[path.stem for path in JOBS])
def test_a_job_is_well_formed(path: Path, bench: ModuleType) -> None:
    source = path.read_text(encoding="utf-8")
    compile(source, f"{path}", "exec")
    job = bench.read_job(path)  # with each constant, and WHERE as exactly one line
    assert job.causes and bench.KINDS.issuperset(job.causes)
    name, equals, number = (job.remedy or "").partition("=")
    assert job.remedy is None or name + equals + "N" * bool(equals) in LEVERS
    assert not equals or number.isdigit()
    assert "told = job.begin(REMEDY" in source and "told.remedied" in source


def test_all_causes_and_peers_are_there(bench: ModuleType) -> None:
    jobs = bench.find_jobs([])
    assert len(jobs) >= 24 + 40
    assert {cause for job in jobs for cause in job.causes} == bench.KINDS
    assert sum(job.trainer != "plain" for job in jobs) >= 12
    assert sum(job.remedy is not None for job in jobs) >= 12


JOB = """
import argparse, json
from pathlib import Path

CAUSE = "few workers"
WHERE = "pass  # here"
REMEDY = {remedy!r}
TRAINER = "plain"

pass  # here
parser = argparse.ArgumentParser()
parser.add_argument("--remedied")
parser.add_argument("--clock", type=Path)
parser.add_argument("--stay", action="store_true")
told = parser.parse_args()
step_s = {{None: 0.3, "workers=4": 0.1, "workers=8": 0.15}}[told.remedied]
for rank in range(2):
    row = {{"step_s": step_s, "waiting_share": 0.4 + rank / 10, "steps": 30}}
    Path(f"{{told.clock}}.{{rank}}").write_text(json.dumps(row))
Path(f"{{told.clock}}.last").write_text("9")
"""


def stand_in(tmp_path: Path, remedy: str | None = "workers=4") -> Path:
    """A job that measures 0.3 s per step at once, a third of it with four workers, on two ranks."""
    path = tmp_path / "slow.py"
    path.write_text(JOB.format(remedy=remedy), encoding="utf-8")
    return path


def answer(where: str, **changes: Any) -> dict[str, Any]:
    """Of a doctor who is right."""
    remedies = [
        {"name": "bf16", "how": "", "predicted": 1.0, "measured": 1.1, "low": 1.0, "verdict": ""},
        {
            "name": "workers=4",
            "how": "",
            "predicted": 3.5,
            "measured": 2.9,
            "low": 2.8,
            "verdict": "",
        },
    ]
    return {
        "steps": 40, "step_s": 0.31, "shares": {"data": 0.47, "forward": 0.2}, "verdict": "so it is",
        "causes": [{"kind": "few workers", "share": 0.47, "where": where, "text": ""}],
        "remedies": remedies,
    } | changes  # fmt: skip


def doctor_who_says(tmp_path: Path, text: str) -> str:
    (tmp_path / "answer.json").write_text(text, encoding="utf-8")
    doctor = tmp_path / "doctor.py"
    doctor.write_text(
        "import subprocess, sys\nfrom pathlib import Path\n"
        "assert sys.argv[1:3] == ['--', sys.executable] and sys.argv[3].endswith('slow.py')\n"
        "assert sys.argv[4] == '--clock' and sys.argv[-1] == '--stay'\n"
        "subprocess.run(sys.argv[2:], check=True)\n"
        "print(Path(__file__).with_name('answer.json').read_text())\n"
    )
    return f"{sys.executable} {doctor}"


def asked(bench: ModuleType, tmp_path: Path, found: dict[str, Any], path: Path) -> dict[str, Any]:
    doctor = doctor_who_says(tmp_path, json.dumps(found))
    row: dict[str, Any] = bench.compared(bench.read_job(path), doctor, pairs=2)
    return row


def test_a_right_answer(bench: ModuleType, tmp_path: Path) -> None:
    path = stand_in(tmp_path)
    line = path.read_text(encoding="utf-8").splitlines().index("pass  # here") + 1
    row = asked(bench, tmp_path, answer(f"{path}:{line}"), path)
    assert row["is_cause"] and row["is_line"] and row["is_waiting"] and bench.is_good(row)
    assert row["waiting"] == 0.45, "the mean of both ranks"
    assert (row["step_s"], row["remedy"], row["is_proposed"]) == (0.3, "workers=4", True)
    assert row["realised"] == 3.0 and row["realised_all"] == [3.0, 3.0]
    assert (row["predicted"], row["measured"], row["low"]) == (3.5, 2.9, 2.8)
    head, body = bench.table([row]).splitlines()
    assert head.index("realised") == body.index("3.00")
    assert "!" not in body


def test_a_wrong_answer(bench: ModuleType, tmp_path: Path) -> None:
    path = stand_in(tmp_path)
    causes = [{"kind": "model", "share": 0.5, "where": None, "text": ""}]
    found = answer("", causes=causes, shares={"data": 0.39}, remedies=[])
    row = asked(bench, tmp_path, found, path)
    assert not (row["is_cause"] or row["is_line"] or row["is_waiting"])
    assert (row["is_proposed"], row["measured"]) == (False, None)
    assert row["realised"] == 3.0, "also of a remedy that is not proposed"
    assert bench.table([row]).splitlines()[1].count("!") == 3


def test_another_line_is_wrong(bench: ModuleType, tmp_path: Path) -> None:
    path = stand_in(tmp_path)
    assert not asked(bench, tmp_path, answer(f"{path}:1"), path)["is_line"]
    [line] = bench.read_job(path).lines
    assert not asked(bench, tmp_path, answer(f"other.py:{line}"), path)["is_line"]


def test_a_job_may_accept_several_causes_and_lines(bench: ModuleType, tmp_path: Path) -> None:
    path = stand_in(tmp_path)
    text = path.read_text(encoding="utf-8").replace('"few workers"', '("read", "few workers")')
    text = text.replace('"pass  # here"', '("import argparse, json", "pass  # here")')
    path.write_text(text, encoding="utf-8")
    first, second = bench.read_job(path).lines
    for line in (first, second):
        row = asked(bench, tmp_path, answer(f"{path}:{line}"), path)
        assert row["is_cause"] and row["is_line"] and row["cause"] == "read or few workers"
    assert not asked(bench, tmp_path, answer(f"{path}:{second + 1}"), path)["is_line"]


def test_threads_are_those_that_are_asked_for(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in bench.environ()
    monkeypatch.setenv(bench.THREADS, "1")
    assert bench.environ()["OMP_NUM_THREADS"] == "1"


def test_the_number_that_is_proposed_is_realised(bench: ModuleType, tmp_path: Path) -> None:
    found = answer("")
    found["remedies"][1] |= {"name": "workers=8", "measured": 2.1}
    found["remedies"].append(found["remedies"][1] | {"name": "workers=16", "measured": None})
    row = asked(bench, tmp_path, found, stand_in(tmp_path))
    assert (row["remedy"], row["realised"], row["measured"]) == ("workers=8", 2.0, 2.1)


def test_a_job_without_a_remedy_is_run_once(bench: ModuleType, tmp_path: Path) -> None:
    row = asked(bench, tmp_path, answer(""), stand_in(tmp_path, remedy=None))
    assert (row["remedy"], row["realised"], row["is_proposed"]) == (None, None, None)


def test_what_fails_is_said(bench: ModuleType, tmp_path: Path) -> None:
    path = stand_in(tmp_path)
    job = bench.read_job(path)
    with pytest.raises(bench.Failed, match="is no JSON"):
        bench.diagnosed(job, doctor_who_says(tmp_path, "step 1"))
    with pytest.raises(bench.Failed, match=r"ended with 2\n(.|\n)*unrecognized arguments"):
        bench.run([sys.executable, f"{path}", "--what"])
    with pytest.raises(bench.Failed, match="without having measured itself"):
        bench.read_clock(job, tmp_path / "nowhere")
    with pytest.raises(bench.Failed, match="ended with 1"):
        bench.clocked(job, "workers=3")
    with pytest.raises(SystemExit, match=r"no job nothing; there are .*read_slow_disk"):
        bench.find_jobs(["nothing"])
    path.write_text(JOB.format(remedy=None) + "\npass  # here\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="exactly one line"):
        bench.read_job(path)
    path.write_text('CAUSE = "read"\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="has no REMEDY, TRAINER, WHERE"):
        bench.read_job(path)
