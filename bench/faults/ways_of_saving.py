"""Trials that harm nothing: some 75 ways of saving, given to `flambeau doctor` and `flambeau tune`.

    python bench/faults/ways_of_saving.py [WAY ...] [--verb tune] [--seed S] [--seconds T] [--quick]
                                          [--flambeau "COMMAND"] [--out FILE] [--record]

Each way (see saving_job.py) gets folders with files of a user: a working directory, a home, a place for
temporary files, a folder outside of them, and one below /var/tmp; WAY,WAY does several at once.
First the script runs there by itself, in a copy: it has to change something, or the way is no test.
Then the command runs its trials, and afterwards every byte, name, link, mode, owner, extended attribute, time
of modification and inode is as it was before; no process, mount or file of the trials is left.
A `Run` that was stopped before is trained to its end afterwards, and ends with the bits of one that nobody
has watched.

Prints a JSON line per way, and one in the end; the exit code is 1 if anything was changed or left, or if a
way could not be tried.
With --out, ways that are in the file are not tried again; after --seconds no new one is begun; --seed gives
the order.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import random
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from saving_job import Way, way_of, ways  # beside this script

JOB = Path(__file__).with_name("saving_job.py")
FLAGS = {
    "doctor": ["--seconds", "1", "--rounds", "1", "--budget", "20s", "--limit", "60s"],
    "tune": ["--rounds", "2", "--budget", "15s", "--limit", "60s"],
}
QUICK = {"doctor": ["--seconds", "0.5", "--no-trials", "--limit", "60s"], "tune": FLAGS["tune"]}
LONE_STEPS = "51"
LONGEST_S = 400
OF_RUNS = ("run_stopped", "run_new")
SHOWN = 6
FACTS = ("mode", "nlink", "uid", "gid", "size", "mtime", "inode", "xattrs", "content")
# Besides $TMPDIR, which is in the snapshot; /tmp itself is of other programs.
SCRATCH = [Path(place) for place in ("/var/tmp", "/dev/shm", "/run") if Path(place).is_dir()]


@dataclass
class User:
    """The folders of one user, below a place.

    Attributes:
        place: below which all lie, but for the one in /var/tmp.
    """

    place: Path
    var: Path = field(init=False)

    def __post_init__(self) -> None:
        self.var = Path("/var/tmp") / f"saving-{self.place.name}-{os.getpid()}"
        for folder in (*self.folders, self.var):
            folder.mkdir(parents=True)

    @property
    def work(self) -> Path:
        return self.place / "work"

    @property
    def folders(self) -> list[Path]:
        return [self.place / name for name in ("work", "home", "tmp", "outside")]

    def environment(self, **more: str) -> dict[str, str]:
        names = ("PATH", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH", "WANDB_MODE", "VIRTUAL_ENV")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {
            **kept,
            "HOME": f"{self.place}/home",
            "TMPDIR": f"{self.place}/tmp",
            "SAVING_OUTSIDE": f"{self.place}/outside",
            "SAVING_VAR": f"{self.var}",
            "OMP_NUM_THREADS": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def run(self, command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
        """In the working directory; all of its group is ended where it takes too long."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.environment(**environment),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def close(self) -> None:
        for folder in (self.place, self.var):
            subprocess.run(["chmod", "-R", "u+rwx", f"{folder}"], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def snapshot(user: User) -> dict[str, tuple[Any, ...]]:
    """Everything below the folders of a user, by path."""
    found: dict[str, tuple[Any, ...]] = {}
    for root in (*user.folders, user.var):
        for folder, names, files in os.walk(os.fsencode(root)):
            for path in (folder, *(folder + b"/" + name for name in (*names, *files))):
                found[os.fsdecode(path)] = facts(path)
    # Whoever makes a file for a moment in the place for temporary files changes its time, as we do.
    found.pop(f"{user.place}/tmp")
    return {str(path).replace(f"{user.place}/", ""): facts for path, facts in found.items()}


def facts(path: bytes) -> tuple[Any, ...]:
    """What a name stands for: kind and mode, links, owner, size, time, inode, attributes, content."""
    told = os.lstat(path)
    kind = stat.S_IFMT(told.st_mode)
    content: Any = None
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:  # noqa: PTH123 - names may be any bytes
            content = hashlib.file_digest(file, "sha256").hexdigest(), told.st_blocks
    elif kind == stat.S_IFLNK:
        content = os.fsencode(Path(os.fsdecode(path)).readlink())
    names = [] if kind == stat.S_IFLNK else os.listxattr(path, follow_symlinks=False)
    extended = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)]
    return (
        oct(told.st_mode),
        told.st_nlink,
        told.st_uid,
        told.st_gid,
        0 if kind == stat.S_IFDIR else told.st_size,
        told.st_mtime_ns,
        told.st_ino,
        extended,
        content,
    )


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In words."""
    said = []
    for path in sorted({*before, *after}):
        if path not in after:
            said.append(f"lost: {path!r}")
        elif path not in before:
            said.append(f"new: {path!r}")
        elif before[path] != after[path]:
            pairs = zip(before[path], after[path], strict=True)
            names = FACTS
            which = [name for name, (one, two) in zip(names, pairs, strict=True) if one != two]
            said.append(f"changed {', '.join(which)}: {path!r}")
    return said


def processes_of(user: User) -> list[str]:
    """Those that have one of the folders in their command, environment or working directory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            told += bytes((folder / "cwd").readlink())
        except OSError:
            continue
        if os.fsencode(f"{user.place}") in told:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
    return found


def left_by(user: User, mounts_before: str, temporary_before: set[str]) -> list[str]:
    """Processes, mounts and scratch folders that are there, some seconds after the command has ended."""
    deadline = time.monotonic() + 3
    while (processes := processes_of(user)) and time.monotonic() < deadline:
        time.sleep(0.2)
    mounts = set(mounts_now().splitlines()) - set(mounts_before.splitlines())
    # While others' trials run, their folders are there, too.
    files = {name for name in names_in_scratch() if "flambeau" in name and not is_in_use(name)}
    return [
        *(f"process {one}" for one in processes),
        *(f"mount {one}" for one in mounts),
        *(f"scratch {one}" for one in files - temporary_before),
    ]


def is_in_use(name: str) -> bool:
    """Whether a process holds the lock of a scratch folder, or has removed the folder meanwhile."""
    time.sleep(0.5)  # one that has just been made is not locked yet
    for place in SCRATCH:
        try:
            lock = os.open(place / name / "in_use", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return not any((place / name).exists() for place in SCRATCH)


def mounts_now() -> str:
    return Path("/proc/self/mounts").read_text()


def names_in_scratch() -> set[str]:
    return {file.name for place in SCRATCH for file in place.iterdir()}


def command_of(way: Way, name: str, verb: str = "train") -> list[str]:
    launch = way.launch if verb == "train" else ()
    return [sys.executable, *launch, f"{JOB}", verb, name]


def lone_run_changes(way: Way, name: str, place: Path) -> str:
    """'' if the script alone, in folders of its own, changes what is there; else why not."""
    user = User(place)
    try:
        made = user.run(command_of(way, name, "prepare"))
        if made.returncode:
            return f"could not be prepared: {made.stderr[-400:]}"
        before = snapshot(user)
        done = user.run(command_of(way, name), SAVING_STEPS=LONE_STEPS, WANDB_MODE="offline")
        if done.returncode:
            return f"fails by itself: {done.stderr[-600:]}"
        if not changed(before, snapshot(user)):
            return "writes nothing by itself"
    finally:
        end(user)
        user.close()
    return ""


def end(user: User) -> None:
    """What a way has left running, as its daemon."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and (
                os.fsencode(f"{user.place}") in (folder / "cmdline").read_bytes()
                or f"{user.place}" in f"{(folder / 'cwd').readlink()}"
            ):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def bits_of_run(user: User, name: str, way: Way) -> str:
    """Train a run to its end, and say what it ends with."""
    done = user.run(command_of(way, name))
    weights = sorted((user.work / "runs/mine").glob("*.safetensors"))
    if done.returncode or not weights:
        return f"no end: {done.stderr[-300:]}"
    return hashlib.sha256(weights[-1].read_bytes()).hexdigest()


def try_way(name: str, way: Way, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One way, from its files to what is left of its trials."""
    began = time.monotonic()
    missing = [one for one in way.needs if importlib.util.find_spec(one) is None]
    if missing:
        return {"way": name, "missing": missing}
    failed = "" if options.not_alone else lone_run_changes(way, name, place / f"{name}-alone")
    user = User(place / name)
    try:
        user.run(command_of(way, name, "prepare"))
        twin = place / f"{name}-twin"
        if name in OF_RUNS:
            shutil.copytree(user.place, twin, symlinks=True)
        before, mounts = snapshot(user), mounts_now()
        scratch = names_in_scratch()
        flags = (QUICK if options.quick else FLAGS)[options.verb]
        if options.verb == "tune":  # its own answer goes to no folder of the user
            flags = [*flags, "--write", f"{user.place}/tuned.toml"]
        command = [*shlex.split(options.flambeau), options.verb, *flags, "--"]
        more = {"WANDB_MODE": "online"} if name == "wandb_online" else {}
        done = user.run([*command, *command_of(way, name)], **more)
        left = left_by(user, mounts, scratch)
        time.sleep(0.5)
        differences = changed(before, snapshot(user))
        if name in OF_RUNS:
            alone = User(place / f"{name}-never")
            shutil.copytree(twin, alone.place, symlinks=True, dirs_exist_ok=True)
            if bits_of_run(user, name, way) != bits_of_run(alone, name, way):
                differences.append("the run ends with other bits than one that was never watched")
            alone.close()
            shutil.rmtree(twin)
    finally:
        end(user)
        user.close()
    first_lines = [line for line in done.stderr.splitlines() if line.strip()][:2]
    return {
        "way": name,
        "verb": options.verb,
        "exit": done.returncode,
        "no_test": failed,
        "changed": differences[:SHOWN],
        "num_changed": len(differences),
        "left": left[:SHOWN],
        "said": first_lines,
        "error": done.stderr[-500:] if done.returncode else "",
        "trials": 1 + done.stderr.count("trying ") + done.stderr.count("trial: "),
        "seconds": round(time.monotonic() - began, 1),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Tried, and nothing was changed or left."""
    return "missing" in row or not (
        row["exit"] or row["no_test"] or row["num_changed"] or row["left"]
    )


def rows_in(file: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """What was tried before, by way and verb."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {(row["way"], row["verb"]): row for row in rows if "verb" in row}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help="default: all")
    parser.add_argument("--verb", choices=sorted(FLAGS), default="doctor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true", help="watch once, and try no changes")
    parser.add_argument(
        "--not-alone", action="store_true", help="do not ask whether ways write at all"
    )
    parser.add_argument("--flambeau", default=f"{sys.executable} -m flambeau")
    parser.add_argument("--out", type=Path, help="append the lines to this file, and go on from it")
    parser.add_argument("--record", action="store_true", help="... to bench/results")
    return parser.parse_args()


def main() -> int:
    sys.path.append(str(Path(__file__).parents[1]))
    from provenance import commit, cpu_model, record

    options = arguments()
    known = ways()
    names = options.ways or random.Random(options.seed).sample(sorted(known), len(known))
    earlier, began, rows = rows_in(options.out), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="saving_") as folder:
        for name in names:
            if (name, options.verb) in earlier:
                rows.append(earlier[name, options.verb])
                continue
            if time.monotonic() - began > options.seconds:
                break
            row = try_way(name, way_of(name), Path(folder), options)
            rows.append(row)
            print(text := json.dumps(row), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(f"{text}\n")
    wrong = [row["way"] for row in rows if not is_right(row)]
    total = {
        "contender": "ways_of_saving",
        "verb": options.verb,
        "ways": len(known),
        "tried": len(rows),
        "missing": [row["way"] for row in rows if "missing" in row],
        "wrong": wrong,
        "trials": sum(row.get("trials", 0) for row in rows),
        "seed": options.seed,
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "kernel": platform.release(),
        "commit": commit(),
    }
    record(total, __file__, keep=options.record)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
