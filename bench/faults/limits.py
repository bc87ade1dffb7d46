"""Limits of the system given to a run: it is told in one line which, nothing is left, a resume is exact.

    python bench/faults/limits.py [--seconds S] [--first NUMBER] [--only TEXT ...] [--seed S] [--record]

`flambeau train` on the embedded images, and a loop with `Run` (limits_job.py), meet a limit at their start or
in their sixth step: of memory (`ulimit -v`, `-d`, a cgroup), open files, processes, the size of files, the
stack, processor time, /dev/shm, a disk that is full or becomes read-only, a clock that jumps by days, a
second start in the same folder.
The limit is on the run, one of its workers, or one of two ranks.
Then the same command starts without the limit, and what it ends with is compared to the bit with a run that
met none.
Bad is: an exit code that says nothing; a last line that does not name the limit; a traceback of the command,
or of a loop more than one; a process that is left; other bits, or a loss of what had been saved.
A limit that a run does not need to end, such as a small /dev/shm, must change nothing.
--only takes cases whose job and name contain one of the texts.

As root on Linux: it makes mounts, each in a namespace of its own or unmounted at its end, and cgroups.
What the machine does not have is told as left out.
Needs the checkout: processes are forked as those of its tests.
Prints a JSON line per case. tests/test_limits.py runs some.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from forked_python import ForkedPython
from kill_storm import Life, differences, log_of
from limits_job import LAST_STEP, MIB, SAVE_EVERY
from provenance import commit, cpu_model, record

JOB = Path(__file__).with_name("limits_job.py")
CLOCK = Path(__file__).with_name("clock.c")
CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1
NOBODY = 54321
COMMAND = [
    "--model", f"{JOB}:net", "--duration", f"{LAST_STEP}st", "--checkpoint-every", f"{SAVE_EVERY}st",
    "--batch-size", "16", "--image-size", "16", "--log-every", "1", "--ema", "0.9", "--precision", "fp32",
    "--device", "cpu", "--stall-timeout", "20",
]  # fmt: skip
KILLED = -9
LONGEST_S = 120
TOLD = (1, 2, 70, 71, 75, 76)


@dataclass(frozen=True)
class Case:
    """A limit, and what must come of it.

    Attributes:
        limit: what begins in the sixth step, of limits_job.LIMITS.
        named: what the last line says of it.
        codes: exit codes that are right; 0 with the bits of a run without a limit.
        at_start: (limit of the resource module, value) from the start on.
        shared: bytes of /dev/shm.
        disk: what the run folder lies on: '5m' is a disk in memory of so much, 'ext4' one in a file.
        environ: added to that of the job.
        as_nobody: as a user whose processes are counted.
        codes_of_others: of the ranks that do not meet the limit.
    """

    name: str
    limit: str = ""
    named: str = ""
    codes: tuple[int, ...] = TOLD
    workers: int = 0
    ranks: int = 1
    at_start: tuple[str, int] | None = None
    shared: str = ""
    disk: str = ""
    environ: Mapping[str, str] | None = None
    as_nobody: bool = False
    starts: int = 1


MEMORY = "[Mm]emory"
NO_TORCH = "memory|failed to map segment|bad_alloc|Cannot load symbol"
ABORTED = -6
FILES = "ulimit -n"
ENDS = (0,)
CASES = (
    Case("no limit", codes=ENDS, workers=2),
    Case("killed", "kill", codes=(KILLED,)),
    *(  # where torch has too little it aborts, and a loop says what torch says
        Case(f"address space of {size} MiB at the start", named=NO_TORCH, codes=(0, ABORTED, *TOLD),
             at_start=("RLIMIT_AS", size * MIB))
        for size in (2000, 3000, 3500, 4000)
    ),
    # glibc may abort, with "out of memory".
    Case("address space of the run", "address space", MEMORY, (0, ABORTED, *TOLD)),
    Case("address space of the run, with workers", "address space", MEMORY, (0, ABORTED, *TOLD), workers=2),
    Case("address space of a rank", "address space", MEMORY, (0, ABORTED, *TOLD), ranks=2),
    Case("address space of a worker", "address space of a worker", MEMORY, (0, *TOLD), workers=2),
    Case("data of the run", "data", MEMORY, (0, *TOLD)),
    Case("data of a worker", "data of a worker", MEMORY, (0, *TOLD), workers=2),
    Case("cgroup of the run", "cgroup", codes=(KILLED,)),
    Case("cgroup of the run, with workers", "cgroup", codes=(KILLED,), workers=2),
    Case("cgroup of a worker", "cgroup of a worker", MEMORY, (0, *TOLD), workers=2),
    Case("cgroup of a rank", "cgroup", "rank 1", (KILLED, *TOLD), ranks=2, environ={"LIMIT_RANK": "1"}),
    *(
        Case(f"{number} files at the start", named=FILES, codes=(0, *TOLD), workers=2,
             at_start=("RLIMIT_NOFILE", number))
        for number in (12, 24, 40, 64)
    ),
    Case("files of the run", "files", FILES, (0, *TOLD)),
    Case("files of the run, with workers", "files", FILES, (0, *TOLD), workers=2),
    Case("files of a rank", "files", FILES, (0, *TOLD), ranks=2),
    Case("files of a worker", "files of a worker", FILES, (0, *TOLD), workers=2),
    *(
        Case(f"{number} processes at the start", named="ulimit -u", codes=(0, *TOLD), workers=2,
             at_start=("RLIMIT_NPROC", number), as_nobody=True)
        for number in (1, 4, 20)
    ),
    Case("processes of the run", "processes", "ulimit -u", (0, *TOLD), as_nobody=True),
    Case("processes of the run, with workers", "processes", "ulimit -u", (0, *TOLD), workers=2,
         as_nobody=True),
    Case("size of files at the start", named="ulimit -f", at_start=("RLIMIT_FSIZE", 20_000)),
    Case("size of files", "size of files", "ulimit -f"),
    Case("stack of 128 KiB", codes=(0, *TOLD), workers=2, at_start=("RLIMIT_STACK", 2**17)),
    Case("stack without a limit", codes=ENDS, workers=2, at_start=("RLIMIT_STACK", resource.RLIM_INFINITY)),
    Case("processor time", "processor time", "ulimit -t|SIGXCPU", (75,)),
    Case("/dev/shm of 32 KiB", named="shared memory", codes=(0, *TOLD), workers=2, shared="32k"),
    Case("/dev/shm of 256 KiB", codes=ENDS, workers=2, shared="256k"),
    Case("/dev/shm of 64 KiB, two ranks", codes=ENDS, ranks=2, shared="64k"),
    Case("/dev/shm is full", "shared memory", "shared memory", (0, *TOLD), workers=2, shared="1m"),
    Case("a disk of 200 KiB", named="No space left", disk="200k"),
    Case("a disk that is full", "disk", "No space left", disk="5m", workers=2),
    Case("a disk that is full, of two ranks", "disk", "No space left", disk="5m", ranks=2),
    Case("an ext4 that is full", "disk", "No space left", disk="ext4"),
    Case("an ext4 that becomes read-only", "read-only disk", "Read-only file system", disk="ext4"),
    *(
        Case(f"a clock that jumps by {days} days", codes=ENDS, workers=2,
             environ={"CLOCK_SHIFT_S": f"{86_400 * days}", "CLOCK_EVERY_MS": "70"})
        for days in (-1, 400)
    ),
    Case("two starts", named="is training in", codes=(0, 2), starts=2, workers=2),
)  # fmt: skip
"""Each is met by the command and by the loop."""


def is_left_out(case: Case) -> str:
    """Why a case cannot be run here, or ''."""
    if os.geteuid() != 0:
        return "it needs root"
    if "cgroup" in case.limit and not os.access(CGROUPS, os.W_OK):
        return "there is no cgroup of version 1 for memory"
    if case.disk == "ext4" and not (
        shutil.which("mkfs.ext4") and Path("/dev/loop-control").exists()
    ):
        return "there is no mkfs.ext4, or no loop device"
    spec = find_spec("torch")
    if case.as_nobody and spec and not is_readable_for_all(Path(str(spec.origin))):
        return "another user may not read this Python's packages"
    return ""


def is_readable_for_all(file: Path) -> bool:
    folders = [one.stat().st_mode & stat.S_IXOTH for one in file.parents]
    return all(folders) and bool(file.stat().st_mode & stat.S_IROTH)


@contextlib.contextmanager
def disk_of(case: Case, folder: Path) -> Iterator[dict[str, str]]:
    """The disk that the run folder lies on; environment variables for limits_job.py."""
    if not case.disk:
        yield {}
        return
    place = folder / "run"  # itself: the log beside it lies elsewhere
    place.mkdir()
    if case.disk != "ext4":
        shell("mount", "-t", "tmpfs", "-o", f"size={case.disk}", "tmpfs", f"{place}")
        try:
            yield {"LIMIT_DISK": f"{place}"}
        finally:
            shell("umount", "-l", f"{place}")
        return
    image = folder / "image"
    image.write_bytes(b"")
    os.truncate(image, 8 * MIB)
    shell("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-e", "remount-ro", f"{image}")
    device = mounted(image, place)
    (place / "lost+found").rmdir()
    try:
        yield {"LIMIT_DISK": f"{place}", "LIMIT_DEVICE": device, "LIMIT_IMAGE": f"{image}"}
    finally:
        shell("umount", f"{place}")


def mounted(image: Path, place: Path) -> str:
    """Mount a file as a disk; gives the device."""
    shell("mount", "-o", "loop", f"{image}", f"{place}")
    return shell("findmnt", "-n", "-o", "SOURCE", f"{place}").strip()


def shell(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def repair_disk(case: Case, disk: Mapping[str, str]) -> None:
    """What a user does before the run is started again."""
    place = disk.get("LIMIT_DISK")
    if place is None:
        return
    if case.limit == "disk":
        Path(place, "filler").unlink()
    elif case.disk == "200k":
        shell("mount", "-o", "remount,size=5m", place)
    else:
        shell("umount", place)
        image = Path(disk["LIMIT_IMAGE"])
        while shell("losetup", "-j", f"{image}"):  # the kernel lets go of it a little later
            time.sleep(0.05)
        subprocess.run(["e2fsck", "-fy", f"{image}"], check=False, capture_output=True)
        mounted(image, Path(place))
        Path(place, "lost+found").rmdir()


@contextlib.contextmanager
def cgroup_of(case: Case) -> Iterator[dict[str, str]]:
    if "cgroup" not in case.limit:
        yield {}
        return
    group = CGROUPS / f"flambeau-limits-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(f"{2**14}")
        yield {"LIMIT_CGROUP": f"{group}"}
    finally:
        group.rmdir()


@functools.cache
def clock_library(folder: Path) -> str:
    library = folder / "clock.so"
    shell("gcc", "-O1", "-shared", "-fPIC", "-o", f"{library}", f"{CLOCK}", "-ldl")
    return f"{library}"


def set_limit(at_start: tuple[str, int] | None) -> None:
    if at_start is not None:
        kind = getattr(resource, at_start[0])
        resource.setrlimit(kind, (at_start[1], resource.getrlimit(kind)[1]))


@dataclass(frozen=True)
class Job:
    """Starts `flambeau train`, or the loop."""

    name: str
    case: Case | None = None  # None: without a limit

    def start(self, words: Sequence[str], *, output: IO[Any], environ: Mapping[str, str]) -> Any:
        """As a new Python, or one that is forked where nothing speaks against it."""
        case = self.case or Case("")
        first = ["-m", "flambeau"] if self.name == "command" else [f"{JOB}"]
        is_plain = not (case.at_start or case.shared or case.as_nobody or case.ranks > 1)
        if is_plain and "LD_PRELOAD" not in environ:  # torch need not be loaded again
            return ForkedPython([*first, *words], output=Path(output.name), environ=environ)
        line = [sys.executable, *first, *words]
        if self.case is not None and case.as_nobody:
            line = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", *line]
        if case.shared:
            mount = f'mount -t tmpfs -o size={case.shared} tmpfs /dev/shm && exec "$@"'
            line = ["unshare", "-m", "sh", "-c", mount, "sh", *line]
        return subprocess.Popen(
            line,
            stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environ,
            preexec_fn=functools.partial(set_limit, case.at_start),  # noqa: PLW1509 - before any thread
        )  # fmt: skip


def life_of(job: Job, run: Path, case: Case, environ: Mapping[str, str]) -> Life:
    core = max(os.sched_getaffinity(0))
    words = COMMAND if job.name == "command" else []
    return Life(
        words,
        run,
        workers=case.workers,
        core=core,
        environ=environ,
        start=job.start,
        ranks=case.ranks,
    )


def ended(life: Life) -> tuple[list[int], list[str]]:
    """Exit codes, and complaints about what is left running."""
    ends, bad = time.monotonic() + LONGEST_S, list[str]()
    for process in life.processes:
        try:
            process.wait(max(0, ends - time.monotonic()))
        except (subprocess.TimeoutExpired, TimeoutError):
            bad.append(f"it hung for {LONGEST_S} s")
            os.killpg(process.pid, signal.SIGKILL)
    codes = [process.wait() for process in life.processes]
    try:
        life.wait_gone()
    except TimeoutError as error:
        bad.append(f"left running: {error}")
    return codes, bad


def meet(
    job: Job, case: Case, run: Path, environ: Mapping[str, str]
) -> tuple[list[int], str, list[str]]:
    """(exit codes, output, complaints) of a start under the limit."""
    lives = [life_of(job, run, case, environ) for _ in range(case.starts)]
    codes, bad = list[int](), list[str]()
    for life in lives:
        found, left = ended(life)
        codes += found
        bad += left
    return codes, lives[0].output, bad


def last_line(output: str) -> str:
    """The last line that says something, without the ones that follow an error of the command."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("flambeau: ")]
    return (errors or lines or [""])[-1]


def complaints(job: Job, case: Case, codes: Sequence[int], output: str) -> Iterator[str]:
    allowed = set(case.codes)
    if job.name == "loop" and allowed & set(TOLD):
        allowed.add(1)  # Python's own, of an exception
    for code in codes:
        if code not in allowed:
            yield f"exit code {code}"
    tracebacks = output.count("Traceback (most recent call last)")
    if tracebacks and job.name == "command":
        yield f"{tracebacks} tracebacks"
    if tracebacks > 1 and job.name == "loop":
        others = ("direct cause of the following", "During handling of", "Original Traceback")
        chained = sum(map(output.count, others))
        if tracebacks > 1 + chained:
            yield f"{tracebacks} tracebacks"
    has_failed = any(codes) and not all(code in (0, KILLED) for code in codes)
    if case.named and has_failed and not re.search(case.named, output[-3000:]):
        yield f"not named: {last_line(output)[:200]}"


def steps_saved(run: Path) -> set[str]:
    return {folder.name for folder in checkpoint_folders(run / "checkpoints")}


def resume(job: Job, case: Case, run: Path, whole: Path, output: str) -> list[str]:
    """Complaints about a start without the limit; `output` is of the one with it."""
    before = steps_saved(run)
    life = life_of(Job(job.name), run, case, {})
    codes, bad = ended(life)
    if any(codes):
        return [*bad, f"the resume ends with {codes}: {last_line(life.output)[:200]}"]
    is_over = f"step-{LAST_STEP:08}" in before
    if before and not is_over and f"from step {int(max(before)[5:])}" not in life.output:
        said = [line for line in life.output.splitlines() if "step" in line][:1]
        bad.append(f"it did not go on from {max(before)}: {said}")
    sizes = run / "micro_batches.json"
    if not sizes.exists():
        return bad + differences(whole, run)[:3]
    # It said so: figures are those of smaller batches, and weights too if it trained in smaller ones.
    bad += [] if "out of memory in" in output else ["smaller micro-batches, and not a word"]
    names = ["model.safetensors"] if json.loads(sizes.read_text())["training"] is None else []
    return bad + [
        f"{name}: other bytes"
        for name in names
        if (run / name).read_bytes() != (whole / name).read_bytes()
    ]


def outcome(job: Job, case: Case, folder: Path, whole: Path) -> dict[str, Any]:
    """What one start under the limit, and the resume after it, gave."""
    folder.mkdir()
    folder.chmod(0o777)
    with disk_of(case, folder) as disk, cgroup_of(case) as group:
        run = folder / "run"
        environ = {"LIMIT": case.limit, **disk, **group, **(case.environ or {})}
        if case.as_nobody:
            environ |= {"HOME": f"{folder}", "TMPDIR": f"{folder}"}
        if "CLOCK_SHIFT_S" in environ:
            environ["LD_PRELOAD"] = clock_library(folder.parent)
        log_of(run).touch()
        codes, output, bad = meet(Job(job.name, case), case, run, environ)
        log_of(run).rename(folder / "met.log")
        repair_disk(case, disk)
        bad += complaints(job, case, codes, output)
        halved = (run / "micro_batches.json").exists()
        bad += resume(job, case, run, whole, output)
    return {
        "job": job.name, "case": case.name, "codes": codes, "halved": halved,
        "said": without_paths(last_line(output), folder)[:300],
        "bad": [without_paths(text, folder) for text in bad],
    }  # fmt: skip


def without_paths(text: str, folder: Path) -> str:
    """As a line of bench/results may have it: nothing of this machine."""
    for path in (folder, Path(__file__).parents[2]):
        text = text.replace(f"{path}/", "")
    return text


def whole_run(job: Job, case: Case, folder: Path) -> Path:
    """A run that meets no limit, with as many ranks; made once."""
    run = folder / f"whole-{job.name}-{case.ranks}"
    if not run.exists():
        codes, bad = ended(life_of(job, run, case, {}))
        assert not any(codes) and not bad, log_of(run).read_text()
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    parser.add_argument("--first", type=int, default=0, help="where to go on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after it")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose job and name contain one of these"
    )
    parser.add_argument("--show", action="store_true", help="print what a bad case said")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    pairs = [(Job(name), case) for case in CASES for name in ("command", "loop")]
    random.Random(arguments.seed).shuffle(pairs)
    # Once: from the first recorded line on the checkout has changes.
    where = {"torch": version("torch"), "processor": cpu_model(), "commit": commit()}
    ends = time.monotonic() + arguments.seconds
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="limits-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for number, (job, case) in enumerate(pairs):
            if number < arguments.first or not any(
                text in f"{job.name} {case.name}" for text in arguments.only
            ):
                continue
            if time.monotonic() > ends:
                print(f"go on with --first {number}")
                break
            if why := is_left_out(case):
                print(f"{number} {job.name} {case.name}: left out, {why}", flush=True)
                continue
            found = outcome(job, case, folder / f"{number}", whole_run(job, case, folder))
            num_bad += bool(found["bad"])
            if found["bad"] and arguments.show:
                print((folder / f"{number}" / "met.log").read_text(errors="replace")[-3000:])
            line = {"bench": "limits", "number": number, "seed": arguments.seed, **found}
            line |= where
            record(line, __file__, keep=arguments.record)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
