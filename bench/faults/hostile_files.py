"""Hostile files given to every command that reads files: what is executed, written elsewhere, or blows up.

    python bench/faults/hostile_files.py [--first NUMBER] [--files N] [--seconds S] [--seed S] [--record]
    python bench/faults/hostile_files.py --only NUMBER [--seed S]

From a whole run, exports, packed files, weights, images and settings each file is made by one change: bits
flipped, cut off, a length that claims gigabytes, a pickle that would write a file, an archive whose names
lead elsewhere or whose content is a thousand times its size, 100,000 brackets, a FIFO, a link to a device.
Each command that takes such a file runs in a process of its own, in a folder of its own.
Bad is: the file of the pickle is there; a name of an archive was written elsewhere, or the run that the file
was made from has changed; a traceback; an exit code other than 0, 1, 2; a signal; more than 60 s of the
processor, the command and its processes together; more than 2 GiB above the process that does nothing.
Time by the clock depends on what else runs here: only after 600 s, when the command is ended, is it a hang.
The line names each bad one by its number, by which --only makes it again.
tests/test_hostile_files.py runs some.
"""

import argparse
import contextlib
import io
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from flambeau.cli.command import main as flambeau
from provenance import commit, cpu_model, record

LONGEST_S = 60  # of the processor
HANGS_S = 600  # by the clock; chosen, ten times as long
ESCAPED = "escaped.png"
MOST_BYTES = 2 * 2**30
SHORT = (
    "--model tiny_convnet --epochs 1 --image-size 16 --batch-size 8 --precision fp32 --device cpu"
)
# {file}: the hostile file or folder; {good}: the run that it was made from; {data}: its images.
COMMANDS = {
    "run": (
        "predict {file} {image}",
        "evaluate {file} {data}",
        "verify {file}",
        "runs {file}",
        "report {file} --out page.html",
        "diff {file} {good}",
        "features {file} {data} --out features.npz",
        "inspect {file}",
        "convert {file} weights.safetensors",
        "soup {file} {good} --data {data} --out soup",
        "export {file} --out shipped --images 4 --format safetensors --allow-slower",
        "train {data} --out {file} " + SHORT,
        "train {data} --out distilled --teacher {file} " + SHORT,
    ),
    "export": ("predict {file} {image}", "evaluate {file} {data}", "verify {file}"),
    "data": (
        "check {file}",
        "verify {file}",
        "pack {file} packed.rec",
        "train {file} --dry-run " + SHORT,
        "evaluate {good} {file}",
    ),
    "weights": ("convert {file} other.safetensors", "verify {file}"),
    "image": ("predict {good} {file}", "check {folder}", "pack {folder} packed.rec"),
    "settings": ("train {data} --config {file} --dry-run " + SHORT,),
    "script": ("lint {file}", "lint {file} --diff"),
}


class Evil:
    """A pickle that would write a file."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({self.canary!r}, 'w').close()",)


def make_good(folder: Path, *, seed: int = 0) -> None:
    """A run, its exports, its images and the same packed in each way."""
    numbers = np.random.default_rng(seed)
    for index in range(24):
        place = folder / "data" / "ab"[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = numbers.integers(0, 120, (20, 20, 3)) + 100 * (index % 2)
        kind = ("jpg", "png", "bmp", "tiff", "webp", "gif")[index % 6]
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.{kind}")
    data, home = folder / "data", folder / "home"
    home.mkdir()
    _make(f"train {data} --out {folder / 'run'} --seed {seed} {SHORT}", home)
    for name in ("rec", "tfrecord", "tar", "zip", "lmdb", "parquet", "h5", "npz"):
        _make(f"pack {data} {folder / f'packed.{name}'}", home, may_fail=True)
    for name in ("torch-export", "onnx", "safetensors"):
        words = f"--format {name} --images 8 --allow-slower"
        _make(f"export {folder / 'run'} --out {folder / name} {words}", home)
    _make(f"convert {folder / 'run'} {folder / 'weights.pth'}", home)
    (folder / "settings.toml").write_text('model = "tiny_convnet"\nlr = 0.1\nepochs = 1\n')
    (folder / "script.py").write_text(
        "import torch\nfrom torch.autograd import Variable\nx = Variable(torch.ones(2))\n"
    )


def _make(line: str, home: Path, *, may_fail: bool = False) -> None:
    code = in_a_fork(line.split(), home, Path(os.devnull), longest_s=600)[0]
    assert may_fail or code == 0, line


def sources(good: Path) -> list[tuple[str, Path, str]]:
    """(kind, folder or file, the file in it that is changed) of all that can be changed."""
    found = []
    for kind, name in [("run", "run")] + [
        ("export", n) for n in ("torch-export", "onnx", "safetensors")
    ]:
        root = good / name
        found += [
            (kind, root, str(path.relative_to(root)))
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]
    found += [("data", path, "") for path in sorted(good.glob("packed.*")) if path.is_file()]
    found += [("data", path, "data.mdb") for path in good.glob("packed.lmdb") if path.is_dir()]
    found += [("weights", good / "weights.pth", ""), ("weights", good / "run", "model.safetensors")]
    found += [("image", path, "") for path in sorted((good / "data").rglob("*.*"))[:12]]
    return [*found, ("settings", good / "settings.toml", ""), ("script", good / "script.py", "")]


def flipped(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def with_a_length(content: bytes, rng: random.Random) -> bytes:
    """Four or eight bytes that claim very much, often near the start, where formats have their lengths."""
    found = bytearray(content.ljust(16, b"\0"))
    place = rng.randrange(min(len(found) - 8, rng.choice([16, 256, len(found)])) or 1)
    claim = rng.choice([b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\0\1\0\0\0", b"\0" * 8])
    found[place : place + len(claim)] = claim
    return bytes(found)


def bomb() -> bytes:
    """A zip of 200 KB that holds 200 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("archive/data.pkl", "a/1.png", "models/model.json"):
            archive.writestr(name, bytes(66_000_000))
    return file.getvalue()


def leading_elsewhere(kind: str, folder: Path) -> bytes:
    """An archive with names that lead out of where it is unpacked, and to `folder`."""
    file = io.BytesIO()
    names = (f"../../../{ESCAPED}", f"../../{ESCAPED}", f"a/../../{ESCAPED}", f"{folder / ESCAPED}")
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
    else:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 1
                archive.addfile(member, io.BytesIO(b"x"))
            link = tarfile.TarInfo("a/link.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    return file.getvalue()


def contents(content: bytes, canary: Path, rng: random.Random) -> dict[str, Callable[[], bytes]]:
    evil = Evil(str(canary))
    return {
        "flipped": lambda: flipped(content, rng),
        "flipped again": lambda: flipped(content, rng),
        "cut": lambda: content[: rng.randrange(len(content) + 1)],
        "length": lambda: with_a_length(content, rng),
        "length again": lambda: with_a_length(content, rng),
        "empty": lambda: b"",
        "noise": lambda: rng.randbytes(rng.choice([7, 1000, 100_000])),
        "twice": lambda: content + content,
        "pickle": lambda: pickle.dumps(evil, protocol=rng.choice([0, 2, 4])),
        "pickle in a zip": lambda: _torch_zip(pickle.dumps(evil, protocol=2)),
        "bomb": bomb,
        "zip that leads elsewhere": lambda: leading_elsewhere("zip", canary.parent),
        "tar that leads elsewhere": lambda: leading_elsewhere("tar", canary.parent),
        "brackets": lambda: rng.choice([b"[", b'{"a":', b"a = [", b"("]) * 100_000,
        "escapes": lambda: b"\x1b]0;owned\x07\x1b[2J" + content,
        "numbers": lambda: b'{"step": 1e999, "epochs": ' + b"9" * 5000 + b', "a": NaN}\n',
    }


def _torch_zip(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return file.getvalue()


def make_hostile(good: Path, folder: Path, number: int, seed: int) -> tuple[str, Path, str]:
    """(kind, the hostile file or folder, what was done) of one number."""
    rng = random.Random(f"{seed} {number}")
    kind, source, inside = rng.choice(sources(good))
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    file = target / inside if inside else target
    if kind == "weights" and inside:
        target = file
    content = file.read_bytes()
    ways = contents(content, folder / "canary", rng)
    way = rng.choice([*ways, "fifo", "device", "folder", "link"])
    if way in ways:
        file.write_bytes(ways[way]())
        return kind, target, f"{source.name}/{inside}: {way}"
    file.unlink()
    if way == "fifo":
        os.mkfifo(file)
    elif way == "folder":
        file.mkdir()
    else:
        file.symlink_to({"device": "/dev/zero", "link": "/etc/passwd"}[way])
    return kind, target, f"{source.name}/{inside}: {way}"


def in_a_fork(
    words: list[str], place: Path, output: Path, *, longest_s: int | None = None
) -> tuple[int, int, float, float]:
    """(exit code, peak of memory in bytes, seconds of the processor, seconds by the clock) of a command.

    The code is -9 where it was ended, as it took `longest_s` of the processor or hung.
    """
    longest_s = LONGEST_S if longest_s is None else longest_s
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(
                0, 0
            )  # not a session: Linux may give a new one a smaller share of the processor
            os.chdir(place)
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES * 3, MOST_BYTES * 3))
            # Where both limits are the same, SIGKILL comes without SIGXCPU, which a training obeys.
            resource.setrlimit(resource.RLIMIT_CPU, (longest_s + 1, longest_s + 1))
            os.environ["HOME"] = os.environ["XDG_STATE_HOME"] = str(place)
            number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(number, 1)
            os.dup2(number, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # A test has others here, which do not end in these files.
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            code = flambeau(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > HANGS_S:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    code, processor_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    return code, used.ru_maxrss * 1024, processor_s, time.monotonic() - started


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of all files, to see what has changed."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            found[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return found


def complaints(good: Path, scratch: Path, number: int, seed: int, idle: int) -> Iterator[str]:
    """What is bad of one hostile file, each with its command."""
    folder = scratch / f"file{number}"
    kind, target, what = make_hostile(good, folder / "given", number, seed)
    image = next((good / "data" / "a").iterdir())
    names = {
        "file": target, "good": good / "run", "data": good / "data", "image": image, "folder": target.parent,
    }  # fmt: skip
    for line in COMMANDS[kind]:
        place = folder / "work"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        before = listing(good)
        output = folder / "output"
        words = line.format(**names).split()
        code, memory, processor_s, clock_s = in_a_fork(words, place, output)
        text = output.read_text(errors="replace")
        bad = []
        if (folder / "given" / "canary").exists():
            bad.append("executed")
        if any(scratch.parent.rglob(ESCAPED)) or listing(good) != before:
            bad.append("wrote elsewhere")
        if "Traceback (most recent call last)" in text:
            bad.append("traceback: " + text.strip().splitlines()[-1][:150])
        if code not in (0, 1, 2):
            bad.append(f"exit code {code}")
        if processor_s > LONGEST_S:
            bad.append(f"{processor_s:.0f} s of the processor")
        if clock_s > HANGS_S:
            bad.append(f"hung for {clock_s:.0f} s")
        if memory > idle + MOST_BYTES:
            bad.append(f"{memory / 2**30:.1f} GiB")
        if "\x1b]0;owned" in text:
            bad.append("escape sequences reach the terminal")
        if bad:
            yield f"{number} ({what}), {line.split()[0]}: {'; '.join(bad)}"
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="where to go on")
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no file after it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one file")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    import torch  # before the forks, which then share it

    torch.set_num_threads(1)
    numbers = range(arguments.first, arguments.first + arguments.files)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    ends = time.monotonic() + arguments.seconds
    num_files = 0
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        good, scratch = Path(folder, "good"), Path(folder, "scratch")
        good.mkdir()
        scratch.mkdir()
        make_good(good)
        idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in numbers:
            if time.monotonic() > ends:
                break
            num_files += 1
            for complaint in complaints(good, scratch, number, arguments.seed, idle):
                print(complaint, flush=True)
                bad.append(complaint)
    line = {
        "bench": "hostile_files",
        "first": numbers[0],
        "files": num_files,
        "seed": arguments.seed,
        "bad": bad,
        "torch": version("torch"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
