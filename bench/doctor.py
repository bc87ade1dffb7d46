"""Asks `flambeau doctor` about trainings with one known cause of lost time, and compares its answers.

    python bench/doctor.py [NAME ...] [--doctor COMMAND] [--pairs N] [--short] [--threads N] [--record]

The trainings are those of bench/doctor_jobs; NAME picks some. Each is given to the doctor, unchanged, and
measured by a clock of its own in the run that is watched: two runs differ by what else the machine does. An
answer is right if

- the first of its causes is of the kind that the job has, at the line that is to blame, where there is one;
- its share of time spent waiting for data is within 5 points of that of the clock.

Where a remedy is known, the job is run by hand without and with it, in turn, by the clock: the median of the
ratios is the gain that is realised, which stands beside the gain that the doctor has measured; `--pairs 0`
leaves that out. Of a remedy with a number, such as workers=4, the proposed number is realised.
`--short` asks for causes and lines alone, in half a minute per job: no trials, fewer seconds, no pairs.
On a machine that others use, torch's threads wait for each other, which is a cause of its own: `--threads 1`.

Prints a table, and a JSON line per job; the exit code is 1 if an answer was wrong or missing. COMMAND gets
`-- python JOB` and writes what `flambeau doctor --json` writes.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model, record  # beside this script

JOBS = Path(__file__).parent / "doctor_jobs"
DOCTOR = f"{sys.executable} -m flambeau doctor --json"
THREADS = "DOCTOR_JOBS_THREADS"
SHORT = " --no-trials --seconds 6"
MEMORY = next((f"{path}" for path in [Path("/dev/shm")] if path.is_dir()), None)
"""Where a job that is watched can leave a file: what it writes elsewhere is thrown away. None: anywhere."""
KINDS = {
    "read", "decode", "transform", "collate", "few workers", "many workers", "worker start", "send",
    "model", "small steps", "sync", "python", "optimizer", "compile", "threads", "slow rank",
    "checkpoint", "evaluation", "debug mode",
}  # fmt: skip
WAITING_POINTS = 0.05  # by which the share of waiting may differ from that of the clock
LIMIT_S = 900  # of one process; the longest takes minutes on two busy cores
_OF_THIS_MACHINE = re.compile(
    rf"{re.escape(f'{JOBS.resolve().parents[1]}/')}|/[^\s\"]*/site-packages/"
)
"""What paths begin with, which is nobody else's business."""


@dataclass(frozen=True)
class Job:
    """A training with a known cause.

    Attributes:
        path: of the script.
        causes: one of `KINDS`, or several, each of which an engineer would accept.
        lines: the numbers of the line that is to blame, from 1, or of several; empty where there is none.
        remedy: the name of the lever that helps; None where only an edit does.
        trainer: whose loop it is.
    """

    path: Path
    causes: tuple[str, ...]
    lines: tuple[int, ...]
    remedy: str | None
    trainer: str


@dataclass(frozen=True)
class Clocked:
    """What a job has measured of itself; with several ranks, their mean."""

    step_s: float
    waiting_share: float


class Failed(Exception):
    """A process of a job, or its doctor, did not do what it should; the message is all that it wrote."""


def read_job(path: Path) -> Job:
    """The constants of a script, which is not run.

    Raises:
        SystemExit: one is missing, or WHERE is not the text of exactly one line.
    """
    source = path.read_text(encoding="utf-8")
    told = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("CAUSE", "WHERE", "REMEDY", "TRAINER")
    }
    missing = {"CAUSE", "WHERE", "REMEDY", "TRAINER"} - told.keys()
    if missing:
        raise SystemExit(f"{path} has no {', '.join(sorted(missing))}")
    texts = [text.strip() for text in source.splitlines()]
    where = several(told["WHERE"])
    for text in where:
        if texts.count(text) != 1:
            raise SystemExit(f"{path}: WHERE must be exactly one line: {text}")
    lines = tuple(texts.index(text) + 1 for text in where)
    return Job(path, several(told["CAUSE"]), lines, told["REMEDY"], told["TRAINER"])


def several(told: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A constant of a job: one text, several that are right, or none."""
    return (told,) if isinstance(told, str) else told or ()


def find_jobs(names: list[str], folder: Path = JOBS) -> list[Job]:
    """All jobs of a folder, or those of these names."""
    paths = {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "job"}
    unknown = sorted(set(names) - paths.keys())
    if unknown:
        raise SystemExit(f"no job {', '.join(unknown)}; there are {', '.join(paths)}")
    return [read_job(paths[name]) for name in names or paths]


def run(command: list[str]) -> str:
    """What a process writes to stdout.

    Raises:
        Failed: it ended with another code than 0, or did not end.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ()
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{shlex.join(command)} ran for more than {LIMIT_S} s") from None
    if done.returncode:
        raise Failed(
            f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def environ() -> dict[str, str]:
    """With as many threads as torch takes by itself, whatever this process was given, or with THREADS."""
    named = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return named | ({"OMP_NUM_THREADS": os.environ[THREADS]} if THREADS in os.environ else {})


def clocked(job: Job, remedy: str | None = None) -> Clocked:
    """Let a job measure itself, as it is or with its cause repaired by hand."""
    repaired = [] if remedy is None else ["--remedied", remedy]
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, f"{job.path}", *repaired, "--clock", f"{folder}/clock"])
        return read_clock(job, Path(folder))


def read_clock(job: Job, folder: Path) -> Clocked:
    """What the ranks of a job have written."""
    rows = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in folder.glob("clock*")
        if file.suffix != ".last"
    ]
    if not rows:
        raise Failed(f"{job.path} has ended without having measured itself")
    return Clocked(
        *(statistics.mean(row[key] for row in rows) for key in ("step_s", "waiting_share"))
    )


def diagnosed(job: Job, doctor: str) -> tuple[dict[str, Any], Clocked, float]:
    """What the doctor writes about a job, what the job has measured meanwhile, and the seconds it took."""
    make_photos(job)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        measured = [f"{job.path}", "--clock", f"{folder}/clock", "--stay"]
        written = run([*shlex.split(doctor), "--", sys.executable, *measured])
        clock = read_clock(job, Path(folder))
    seconds = time.perf_counter() - start
    try:
        found = json.loads(_OF_THIS_MACHINE.sub("", written))
    except json.JSONDecodeError as error:
        raise Failed(
            f"the doctor's answer about {job.path} is no JSON: {error}\n{written}"
        ) from error
    return found, clock, seconds


def make_photos(job: Job) -> None:
    """Those that a job asks for, before it is watched: each run of it would make and lose its own."""
    nodes = ast.walk(ast.parse(job.path.read_text(encoding="utf-8")))
    texts = {ast.unparse(node) for node in nodes if isinstance(node, ast.Call)}
    made = {text for text in texts if text.startswith("job.photos(")}
    if made:
        code = (
            f"import sys; sys.path.insert(0, {str(JOBS)!r}); import job; {'; '.join(sorted(made))}"
        )
        run([sys.executable, "-c", code])


def judged(job: Job, waiting_share: float, found: dict[str, Any]) -> dict[str, Any]:
    """What the doctor found of the cause, and whether it is right.

    Args:
        job: what it was asked about.
        waiting_share: of the clock.
        found: its answer.
    """
    first = found["causes"][0] if found["causes"] else {"kind": None, "where": None}
    share = found["shares"].get("data", 0.0) + found["shares"].get("worker start", 0.0)
    file, _, number = (first["where"] or "").rpartition(":")
    is_named = Path(file).name == job.path.name and number in map(str, job.lines)
    return {
        "cause": " or ".join(job.causes), "cause_found": first["kind"],
        "is_cause": first["kind"] in job.causes,
        "line": next(iter(job.lines), None), "where_found": first["where"],
        "is_line": is_named or not job.lines,
        "waiting": round(waiting_share, 3), "waiting_found": round(share, 3),
        "is_waiting": abs(share - waiting_share) <= WAITING_POINTS,
    }  # fmt: skip


def remedy_of(job: Job, found: dict[str, Any]) -> dict[str, Any] | None:
    """The remedy of a job among those of an answer: by its name, or by its name with another number."""
    same = [one for one in found["remedies"] if one["name"] == job.remedy]
    kind, equals, _ = (job.remedy or "").partition("=")
    near = [one for one in found["remedies"] if equals and one["name"].startswith(kind + equals)]
    near.sort(key=lambda one: -(one.get("measured") or 0))
    return (same or near or [None])[0]


def compared(job: Job, doctor: str, *, pairs: int) -> dict[str, Any]:
    """All about one job: its clock, the doctor's answer, and what the remedy realises."""
    before, after = list[Clocked](), list[Clocked]()
    found, clock, seconds = diagnosed(job, doctor)
    own = None if job.remedy is None else remedy_of(job, found)
    name = job.remedy if own is None else own["name"]
    for _ in range(0 if name is None else pairs):
        before.append(clocked(job))
        after.append(clocked(job, name))
    gains = sorted(a.step_s / b.step_s for a, b in zip(before, after, strict=True))
    row = {"job": job.path.stem, "trainer": job.trainer} | judged(job, clock.waiting_share, found)
    row |= {
        "step_s": round(clock.step_s, 5),
        "step_s_found": found["step_s"], "doctor_s": round(seconds, 1), "verdict": found["verdict"],
        "remedy": name, "is_proposed": None if job.remedy is None else own is not None,
        "realised": round(statistics.median(gains), 3) if gains else None,
        "realised_all": [round(gain, 3) for gain in gains],
    }  # fmt: skip
    for key in ("predicted", "measured", "low"):
        row[key] = None if own is None else own.get(key)
    return row


def is_good(row: dict[str, Any]) -> bool:
    """The right cause, at the right line, with the right share of waiting."""
    return row["is_cause"] and row["is_line"] and row["is_waiting"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text; what is wrong carries an exclamation mark."""

    def mark(value: object, good: bool) -> str:
        return f"{value}{'' if good else ' !'}"

    def gain(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [["job", "trainer", "cause", "found", "line", "found", "waiting", "found", "step ms",
              "remedy", "realised", "measured"]]  # fmt: skip
    for row in rows:
        cells.append([
            row["job"], row["trainer"], row["cause"], mark(row["cause_found"], row["is_cause"]),
            f"{row['line'] or '-'}", mark((row["where_found"] or "-").rpartition("/")[2], row["is_line"]),
            f"{row['waiting']:.2f}", mark(f"{row['waiting_found']:.2f}", row["is_waiting"]),
            f"{row['step_s'] * 1e3:.1f}", row["remedy"] or "-", gain(row["realised"]), gain(row["measured"]),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="jobs; all where none is named")
    parser.add_argument("--doctor", default=DOCTOR)
    parser.add_argument(
        "--pairs", type=int, default=3, help="runs without and with the remedy; 0 for none"
    )
    parser.add_argument("--short", action="store_true", help=f"the doctor with{SHORT}, no pairs")
    parser.add_argument("--threads", type=int, help="of torch in the jobs; all cores by default")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    if told.pairs < 0:
        parser.error("--pairs must be at least 0")
    if told.short:
        told.doctor, told.pairs = told.doctor + SHORT, 0
    if told.threads:
        os.environ[THREADS] = f"{told.threads}"
    packages = ("torch", "lightning", "transformers", "accelerate", "timm")
    origin = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "cpu": cpu_model(), "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    rows, failed = [], []
    for job in find_jobs(told.names):
        print(job.path.stem, file=sys.stderr, flush=True)
        try:
            rows.append(compared(job, told.doctor, pairs=told.pairs))
        except Failed as error:
            print(error, file=sys.stderr)
            failed.append(job.path.stem)
            continue
        program, *words = shlex.split(told.doctor)
        doctor = shlex.quote(shlex.join([Path(program).name, *words]))
        command = f"python bench/doctor.py {job.path.stem} --doctor {doctor} --pairs {told.pairs}"
        command += f" --threads {told.threads}" if told.threads else ""
        record(rows[-1] | origin | {"command": command}, __file__, keep=told.record)
    print(table(rows), *(f"{name} failed" for name in failed), sep="\n")
    return int(bool(failed) or not all(map(is_good, rows)))


if __name__ == "__main__":
    sys.exit(main())
