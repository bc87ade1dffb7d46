"""Each call that changes a file fails, in each job that writes files: nothing is lost or silently wrong.

    python bench/faults/write_faults.py [--seed S] [--seconds S] [--first NUMBER] [--only TEXT ...] [--record]

Trainings, a loop with `Run`, packing into each format, exports, conversions, tables, reports, and what else
writes, are watched from outside (failing_calls.py): each write, sync, rename, mkdir, unlink, link and
opening to write below their folder is one call.
At one of them the process dies, before it or after half of a write; or it fails, once or from then on, as on
a disk that is full, beyond its quota, read-only, broken or gone; or half is written, and the rest is up to
the program.
Then the same command starts again, on a disk that works.
Bad is: content that lay there before and is nowhere; an end with exit code 0 and other output than without
the fault, and not a word; a traceback; an error that does not name the disk's answer and a file of the job;
an exit code that is not of the command's help; a second start that fails, gives other bits, or leaves files
behind; a process that hangs or is left.

x86-64 Linux. Needs the checkout: processes are forked as those of its tests.
Prints a JSON line per part, as many cases as fit into --seconds; a further part goes on with --first.
Each case that is bad is a line of its text, which --only repeats. tests/test_write_faults.py runs some.
"""

import argparse
import contextlib
import errno
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
from PIL import Image

from failing_calls import WRITES, Call, Fault, Supervisor, without_random_names
from forked_python import ForkedPython
from kill_storm import differences, group_members, log_of
from provenance import commit, cpu_model, record

HERE = Path(__file__).parent
JOB = HERE / "limits_job.py"
LONGEST_S = 60
DAY_S = 86_400
DEATHS = ("kill", "torn")
ONCE = ("kill", "EIO", "ENOSPC", "EDQUOT", "ESTALE")
FROM_THEN_ON = ("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE")
OF_WRITES = ("short", "torn")
KILLED = -signal.SIGKILL
CODES = (1, 2, 75, 76)
WATCHED = """
import runpy, sys, tempfile
tempfile.tempdir = None  # that of the process which it was forked from
sys.path.insert(0, {here!r})
from failing_calls import watch_me
watch_me({address!r})
sys.argv = {words!r}
if sys.argv[0] == "flambeau":
    from flambeau.cli.command import main
    sys.exit(main())
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CACHES = re.compile(
    r"home/\.(cache|config)($|/(matplotlib|Microsoft|flambeau-lint))|tmp/(\.ses|tmp\w+wandb|flambeau-pt2-)"
)
"""Caches, what other packages write as they like, and what killed exports leave where the system removes."""
STATE = re.compile(r"home/\.local/state/")
"""What says that code was made here: without it a later command asks for --trust."""
OLDER = re.compile(r".*checkpoints/step-\d{8}/[^.]")
"""A whole checkpoint: an older one is not removed twice if its removal did not begin."""
HIDDEN = re.compile(r".*[.-](\w{8}|\w{16})\.tmp")
TRAIN = (
    f"flambeau train images --model {JOB}:net --duration 4st --checkpoint-every 2st --batch-size 8 "
    "--image-size 16 --log-every 1 --ema 0.9 --device cpu --precision fp32 --keep 2"
)
SWEEP = TRAIN.replace("flambeau train", "flambeau sweep")


@dataclass(frozen=True)
class Job:
    """A command that writes.

    Attributes:
        words: of the command, in a folder that has what `make_inputs` makes.
        older: a command that ran there before, whose output is the user's.
        may_go: files that the command is told to replace or to remove.
        aside: names that a further start may give to what it finds.
        run: the run folder that it writes, compared by what a run promises.
    """

    name: str
    words: str
    older: str = ""
    may_go: str = "$^"
    aside: str = "$^"
    run: str = ""


def packing(name: str, flags: str = "") -> Job:
    return Job(f"pack {name} {flags}".strip(), f"flambeau pack images {name} --workers 1 {flags}")


def replacing(words: str, file: str, older: str) -> Job:
    """A command with --force, over a file of another run."""
    name = f"{words.split()[0]} {file}"
    return Job(name, f"flambeau {words} {file} --force", f"flambeau {older}", re.escape(file))


JOBS = (
    Job("train", f"{TRAIN} --out new --workers 0", run="new"),
    Job("train with workers", f"{TRAIN} --out new --workers 2", run="new"),
    Job("train --fresh", f"{TRAIN} --out new --workers 0 --fresh", f"{TRAIN} --out new --workers 0 --seed 5",
        aside=r"new\.old-\d+", run="new"),
    Job("loop", f"{JOB} train --out new", run="new"),
    packing("a.rec", "--shards 2"),
    packing("a.tar", "--encode png"),
    packing("a.tfrecord"),
    packing("a.npz", "--encode raw"),
    packing("a.npy", "--encode raw"),
    packing("a.lmdb"),
    packing("a.parquet"),
    packing("a.zip"),
    packing("folder"),
    Job("export", "flambeau export run --out new --allow-slower"),
    replacing("convert run", "old.pth", "convert other old.pth"),
    replacing("convert run", "old.safetensors", "convert other old.safetensors"),
    replacing("report run --out", "page.html", "report other --out page.html"),
    replacing("predict run images --out", "t.csv", "predict other images --out t.csv"),
    Job("evaluate", "flambeau evaluate run images --out t.csv --plot p.png --force"),
    Job("features", "flambeau features run images f.safetensors --force"),
    Job("check", "flambeau check images --out t.csv --force"),
    Job("certify", "flambeau certify run"),
    Job("soup", "flambeau soup run other --out new"),
    Job("salvage", "flambeau verify damaged.rec --salvage saved.rec"),
    Job("inspect", f"flambeau inspect {JOB}:net --graph g.svg --force"),
    Job("sweep", f"{SWEEP} --out new --set lr=0.01,0.1 --at-once 1 --procs 1"),
    Job("lint", "flambeau lint script.py --fix --allow-dirty", may_go=r"script\.py"),
)  # fmt: skip


# ------------------------------------------------------------------ what a job finds


def make_inputs(folder: Path) -> None:
    """Images, two runs, a damaged file and a script."""
    numbers = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 3)):
        for label, name in enumerate(("ant", "bee")):
            (folder / "images" / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = numbers.integers(0, 200, (16, 16, 3), dtype=np.uint8) + 50 * label
                path = folder / "images" / part / name / f"{index}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "tmp").mkdir()
    (folder / "home").mkdir()
    (folder / "script.py").write_text(
        "import torch\nx = torch.load('a.pt')\ntorch.cuda.amp.autocast()\n"
    )
    for words in (
        f"{TRAIN} --out run --workers 0",
        f"{TRAIN} --out other --workers 0 --lr 0.01",
        "flambeau pack images/train damaged.rec --workers 1",
    ):
        started = start(words, folder)
        assert started.code == 0, started.said
    content = bytearray((folder / "damaged.rec").read_bytes())
    content[len(content) // 2] ^= 64
    (folder / "damaged.rec").write_bytes(content)


# ------------------------------------------------------------------ one start


@dataclass(frozen=True)
class Started:
    """What a start has come to.

    Attributes:
        calls: that change a file below its folder.
        hit: those that the fault met.
        left: processes that outlived it.
    """

    code: int
    said: str
    calls: list[Call]
    hit: list[Call]
    left: list[int]
    hung: bool


def start(words: str, folder: Path, fault: Fault | None = None, **environ: str) -> Started:
    """Run a command there, watched, with more variables of the environment."""
    output = folder.with_suffix(".out")
    output.write_bytes(b"")
    supervisor = Supervisor(folder, fault)
    code = WATCHED.format(here=f"{HERE}", address=supervisor.address, words=shlex.split(words))
    environ = {
        **os.environ, **environ, "HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp", "OMP_NUM_THREADS": "1",
        "FLAMBEAU_DATA": f"{folder}/home/data", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    with contextlib.chdir(folder):
        process = ForkedPython(["-c", code], output=output, environ=environ)
    hung = False
    try:
        process.wait(LONGEST_S)
    except TimeoutError:
        hung = True
        os.killpg(process.pid, signal.SIGKILL)
    left = processes_left(process.pid)
    supervisor.close()
    text = output.read_text(errors="replace")
    return Started(process.wait(), text, supervisor.calls, supervisor.hit, left, hung)


def processes_left(group: int) -> list[int]:
    """Those that are there some seconds after the first has ended; they are ended."""
    ends = time.monotonic() + 20  # torch's own watchdog in a worker looks every 5 s
    while (left := group_members(group)) and time.monotonic() < ends:
        time.sleep(0.01)
    if left:
        os.killpg(group, signal.SIGKILL)
    return left


# ------------------------------------------------------------------ what is there


def tree(folder: Path) -> dict[str, bytes]:
    """Content by path; folders that are empty count."""
    found = {}
    for path in sorted(folder.rglob("*")):
        # What flambeau has made is noted by the hash of its content, which may have a time in it.
        name = re.sub("[0-9a-f]{64}", "*", f"{path.relative_to(folder)}")
        if CACHES.match(name):
            continue
        if path.is_file() and name != "new.log":
            found[name] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


@dataclass
class Reference:
    """A job without faults: what lies there before and after, and its calls."""

    job: Job
    folder: Path
    before: dict[str, bytes]
    after: dict[str, bytes]
    changing: set[str]
    calls: list[Call]
    code: int


def reference(job: Job, inputs: Path, folder: Path, place: Path) -> Reference:
    """Run it twice: what differs depends on the clock. All starts are in one place, which some files name."""
    shutil.copytree(inputs, place)
    if job.older:
        older = start(job.older, place)
        assert older.code == 0, older.said
    place.rename(folder / "before")
    found = []
    for name in ("whole", "twice"):
        shutil.copytree(folder / "before", place)
        started = start(job.words, place)
        assert started.code in (0, 1), started.said
        found.append(tree(place))
        place.rename(folder / name)
    if job.run:
        log_of(folder / "whole" / job.run).touch()
    assert found[0].keys() == found[1].keys(), found[0].keys() ^ found[1].keys()
    changing = {name for name, content in found[0].items() if found[1][name] != content}
    # Its times have more or fewer digits now and then; of `run` it is compared as objects.
    changing |= {
        name for name in found[0] if name.endswith("training_state.pt") or "/logs/" in name
    }
    before = tree(folder / "before")
    return Reference(job, folder, before, found[0], changing, started.calls, started.code)


def unlike(of: Reference, now: dict[str, bytes], folder: Path) -> list[str]:
    """How what is there now differs from the end of a job that met no fault."""
    aside = re.compile(of.job.aside)
    found = [f"missing: {name}" for name in of.after if name not in now and not STATE.match(name)]
    found += [
        f"left: {without_random_names(name)}"
        for name in now
        if name not in of.after and not aside.match(name) and not OLDER.match(name)
    ]
    is_in_run = re.compile(f"{of.job.run}/" if of.job.run else "$^")
    found += [
        f"differs: {name}"
        for name, content in of.after.items()
        if not is_in_run.match(name)
        and name in now
        and name not in of.changing
        and not STATE.match(name)
        and now[name] != content
    ]
    if of.job.run and not found:
        log_of(folder / of.job.run).touch()
        found += differences(of.folder / "whole" / of.job.run, folder / of.job.run)[:3]
    return found


def lost(of: Reference, now: dict[str, bytes]) -> list[str]:
    """Files of before that are nowhere, and were not replaced as they should be."""
    contents = set(now.values())
    may_go = re.compile(of.job.may_go)
    found = []
    for name, content in of.before.items():
        if content in contents or STATE.match(name) or name.endswith(("/", ".lock")):
            continue
        is_replaced = (
            may_go.match(name)
            and name in now
            and (now[name] == of.after[name] or name in of.changing)
        )
        if not is_replaced:
            found.append(f"lost: {name}")
    return found


def told(of: Reference, fault: Fault, started: Started) -> list[str]:
    """What an error lacks."""
    found = []
    if "Traceback (most recent call last)" in started.said and of.job.words.startswith("flambeau"):
        found.append("a traceback")
    if started.code not in CODES:
        found.append(f"exit code {started.code}")
    answer = answer_of(fault)
    lines = [line for line in started.said.splitlines() if answer.lower() in line.lower()]
    names = {part for call in started.hit for part in Path(call.path).parts or ("case", ".")}
    names |= {re.sub(r"(\.(flambeau-lint-)?\*)?\.tmp$", "", name.lstrip(".")) for name in names}
    names |= {word for word in shlex.split(of.job.words)[2:] if word not in of.before}
    if not any(name in line for line in lines for name in names):
        found.append(f"not named: {lines[-1:] or started.said.splitlines()[-1:]}")
    return found


def answer_of(fault: Fault) -> str:
    """What the disk says, in words."""
    return os.strerror(getattr(errno, fault.kind))


def is_told(fault: Fault, met: Started, folder: Path) -> bool:
    """Whether what the disk says is in the output, or in that of a sweep's trial."""
    logs = [path.read_text(errors="replace") for path in folder.glob("*/logs/*.txt")]
    return any(answer_of(fault).lower() in text.lower() for text in (met.said, *logs))


def judge(of: Reference, fault: Fault, folder: Path) -> tuple[str, list[str], str]:
    """(outcome, complaints, last words) of one case."""
    shutil.copytree(of.folder / "before", folder)
    met = start(of.job.words, folder, fault)
    lines = [line for line in met.said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if not met.hit:
        return "not met", [], last
    now = tree(folder)
    bad = lost(of, now)
    bad += ["it hung"] if met.hung else []
    bad += ["processes were left"] if met.left else []
    if met.code == of.code:
        # A disk on which nothing can be removed leaves what a later day removes.
        different = [
            text for text in unlike(of, now, folder) if not text.endswith((".tmp", ".tmp/"))
        ]
        if not different:
            return "the same end", bad, last
        if fault.kind in OF_WRITES or not is_told(fault, met, folder):
            bad += [f"silently {text}" for text in different]
        return "went on, and told", bad, last
    if met.code == KILLED:
        outcome = "killed"
        bad += [] if fault.kind in DEATHS else ["killed"]
    else:
        outcome = "refused"
        bad += told(of, fault, met) if fault.kind not in (*DEATHS, "short") else []
        bad += ["short writes are no error"] if fault.kind == "short" else []
    bad += again(of, folder)
    return outcome, bad, last


def again(of: Reference, folder: Path) -> list[str]:
    """Complaints about the same command on a later day, on a disk that works."""
    words = of.job.words
    for path in folder.rglob(".*"):
        if HIDDEN.fullmatch(path.name):
            os.utime(path, (path.stat().st_atime - 2 * DAY_S, path.stat().st_mtime - 2 * DAY_S))
    second = start(words, folder)
    for flag in ("--force", "--fresh"):
        if second.code == 2 and flag in second.said and flag not in words:
            second = start(f"{words} {flag}", folder)
    if second.code == 2 and not unlike(of, tree(folder), folder):
        return []  # all was there before the error, and nothing is replaced
    if second.code not in (0, 1):
        lines = [line for line in second.said.splitlines() if line.strip()]
        return [f"again: exit code {second.code}: {lines[-1:]}"]
    now = tree(folder)
    return [f"again: {text}" for text in (*unlike(of, now, folder), *lost(of, now))]


# ------------------------------------------------------------------ the campaign


def faults_of(calls: list[Call]) -> Iterator[Fault]:
    for call in calls:
        for kind in ONCE:
            yield Fault(call, kind)
        for kind in FROM_THEN_ON:
            yield Fault(call, kind, lasts=True)
        for kind in OF_WRITES if call.name in WRITES else ():
            yield Fault(call, kind)


def cases(references: list[Reference], seed: int) -> list[tuple[Reference, Fault]]:
    """All of them; each job has its turn, until it has no more."""
    rng = random.Random(seed)
    decks = []
    for of in references:
        deck = [(of, fault) for fault in faults_of(of.calls)]
        rng.shuffle(deck)
        decks.append(deck)
    longest = max(map(len, decks))
    return [deck[number] for number in range(longest) for deck in decks if number < len(deck)]


def references_of(names: list[str], scratch: Path) -> list[Reference]:
    """Of these jobs, or all; made in folders of scratch."""
    place = scratch / "case"
    place.mkdir()
    make_inputs(place)
    place.rename(scratch / "inputs")
    found = []
    for number, job in enumerate(JOBS):
        if not names or job.name in names:
            (scratch / f"{number}").mkdir()
            found.append(reference(job, scratch / "inputs", scratch / f"{number}", place))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    parser.add_argument("--first", type=int, default=0, help="where to go on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after it")
    parser.add_argument("--jobs", nargs="+", default=[], help="these alone; in another order")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose text has one of these")
    parser.add_argument("--calls", action="store_true", help="print the calls of the jobs")
    parser.add_argument("--show", action="store_true", help="print each case, and its last words")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    where = {"torch": version("torch"), "processor": cpu_model(), "commit": commit()}
    counts: Counter[str] = Counter()
    bad_cases = []
    with tempfile.TemporaryDirectory(prefix="write-faults-") as name:
        scratch = Path(name)
        references = references_of(arguments.jobs, scratch)
        if arguments.calls:
            print(*(f"{of.job.name}: {call}" for of in references for call in of.calls), sep="\n")
        all_cases = cases(references, arguments.seed)
        number = arguments.first
        while number < len(all_cases) and time.monotonic() - began < arguments.seconds:
            of, fault = all_cases[number]
            number += 1
            text = f"{of.job.name}: {fault}"
            if not any(part in text for part in arguments.only):
                continue
            outcome, bad, last = judge(of, fault, scratch / "case")
            shutil.rmtree(scratch / "case")
            counts.update([outcome, fault.kind])
            if bad:
                bad_cases.append(f"{text}: {'; '.join(bad)}".replace(name, ""))
            if bad or arguments.show:
                said = f"{outcome} {bad} | {last}".replace(name, "")
                print(f"{number - 1} {text} -> {said}", file=sys.stderr, flush=True)
    line = {
        "bench": "write_faults", "seed": arguments.seed, "first": arguments.first, "next": number,
        "of": len(all_cases), "cases": counts.total() // 2, **dict(sorted(counts.items())),
        "jobs": len(references), "calls": sum(len(of.calls) for of in references),
        "bad": bad_cases, "seconds": round(time.monotonic() - began), **where,
    }  # fmt: skip
    record(line, __file__, keep=arguments.record)
    return 1 if bad_cases else 0


if __name__ == "__main__":
    sys.exit(main())
