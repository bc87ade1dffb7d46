"""Damages of files at rest: each is found before anything is made of them, or changes no result.

    python bench/faults/damage_at_rest.py [--damages N] [--seconds S] [--first NUMBER] [--seed S] [--record]
    python bench/faults/damage_at_rest.py --only NUMBER [--seed S]

Damaged are finished runs, a run that was stopped, exports and packed files: bits flipped, cut off, a block of
zeros, a block or all of the same file of another version, two files swapped, a file missing or longer.
`found`: `flambeau verify`, or the command that uses the files, ends with code 1 or 2.
`harmless`: what is made of them has the same bytes as without the damage; so it is of a run that goes on from
the checkpoint before.
Neither is bad: the line names each by its number, by which --only makes it again.
Formats that lack a checksum for some of their bytes are counted apart, in `unprotected`.
tests/test_damage_at_rest.py runs some.
"""

import argparse
import hashlib
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile_files import SHORT, in_a_fork, make_good
from provenance import commit, cpu_model, record

BLOCK = 512
LONGEST_S = 600  # for anything at all; only a hang takes as long
TRAIN = "train {data} --out {file} --checkpoint-every 1st --keep 9 --epochs 2 " + SHORT.replace(
    "--epochs 1 ", ""
)


@dataclass(frozen=True)
class Kept:
    """What lies on the disk, the same of another version, and the commands that read it.

    Attributes:
        made: the file in it that the last command makes; its output if empty.
    """

    name: str
    path: Path
    other: Path
    commands: tuple[str, ...]
    made: str = ""


def make_all(folder: Path) -> list[Kept]:
    """Two versions of everything, of other pixels and another seed."""
    for version_name in ("good", "other"):
        place = folder / version_name
        place.mkdir()
        make_good(place, seed=int(version_name == "other"))
        names = {"data": place / "data", "file": place / "stopped"}
        words = TRAIN.format(**names).split()
        code = in_a_fork(words, place / "home", folder / "output", longest_s=LONGEST_S)[0]
        assert code == 0, (folder / "output").read_text()
        for late in ("result.json", "model.safetensors", "report.html"):
            (place / "stopped" / late).unlink()
        newest = sorted((place / "stopped" / "checkpoints").iterdir())[-2:]
        for checkpoint in newest:
            shutil.rmtree(checkpoint)
    good, other = folder / "good", folder / "other"
    run = ("verify {file}", "predict {file} {image}")
    found = [
        Kept("run", good / "run", other / "run", run),
        Kept("stopped run", good / "stopped", other / "stopped", (TRAIN,), "model.safetensors"),
    ]
    for name in ("torch-export", "onnx", "safetensors"):
        found.append(Kept(f"export {name}", good / name, other / name, run))
    for path in sorted(good.glob("packed.*")):
        if path.suffix in KINDS:
            check = ("verify {file}", "evaluate {run} {file}")
            found.append(Kept(path.name, path, other / path.name, check))
    return found


KINDS = {
    ".rec": False,
    ".tfrecord": True,
    ".tar": False,
    ".zip": True,
    ".lmdb": False,
    ".parquet": True,
    ".h5": False,
    ".npz": True,
}
"""Packed files by whether each byte of an image has a checksum in the format itself."""
CACHED = re.compile(r"\S+\.arrow")
"""The copy of a Parquet file, which is named after the file's bytes; the command says where it is."""


def is_protected(kept: Kept) -> bool:
    return KINDS.get(kept.path.suffix, True)


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def damage(kept: Kept, path: Path, rng: random.Random) -> str:
    """Change one file of the copy at `path`; says which, and how."""
    file = rng.choice(files_of(path))
    inside = file.relative_to(path) if path.is_dir() else Path()
    before = content = file.read_bytes()
    twin = kept.other / inside
    newer = twin.read_bytes() if twin.is_file() else b""
    at = rng.randrange(len(content) or 1)
    end = at + rng.choice([1, 16, BLOCK])
    way = rng.choice(
        ["bit", "bits", "cut", "zeros", "block", "version", "swapped", "missing", "longer"]
    )
    if way in ("bit", "bits"):
        changed = bytearray(content or b"\0")
        for _ in range(1 if way == "bit" else 8):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        content = bytes(changed)
    elif way == "cut":
        content = content[:at]
    elif way == "zeros":
        content = content[:at] + bytes(len(content[at:end])) + content[end:]
    elif way == "block":
        content = content[:at] + newer[at:end] + content[at + len(newer[at:end]) :]
    elif way == "version":
        content = newer
    elif way == "longer":
        content += rng.randbytes(rng.choice([1, BLOCK]))
    elif way == "swapped":
        partner = rng.choice(files_of(path))
        content = partner.read_bytes()
        partner.write_bytes(before)
    if way == "missing" and path.is_dir():
        file.unlink()
    elif content != before:
        file.write_bytes(content)
    else:
        way = "nothing"
    return f"{kept.name}/{inside}: {way}"


def made_of(kept: Kept, path: Path, good: Path, scratch: Path) -> tuple[int, bytes, str]:
    """(exit code, what is made, output) of the commands, up to the first that does not end with 0."""
    image = next((good / "data" / "a").iterdir())
    names = {"file": path, "data": good / "data", "image": image, "run": good / "run"}
    place, output = scratch / "work", scratch / "output"
    for command in kept.commands:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        words = command.format(**names).split()
        code = in_a_fork(words, place, output, longest_s=LONGEST_S)[0]
        if code:
            return code, b"", output.read_text(errors="replace")
    text = CACHED.sub("", output.read_text(errors="replace"))
    if kept.made:
        return 0, hashlib.sha256((path / kept.made).read_bytes()).digest(), text
    return 0, text.encode(), text


def copied(kept: Kept, scratch: Path) -> Path:
    path = scratch / "kept" / kept.path.name
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    if kept.path.is_dir():
        shutil.copytree(kept.path, path)
        return path
    names = (f"{kept.path.name}*", f"{kept.path.stem}.idx", f"{kept.path.stem}.classes.txt")
    for beside in (one for name in names for one in kept.path.parent.glob(name)):
        shutil.copyfile(beside, path.parent / beside.name)
    return path


def outcomes(
    everything: list[Kept], good: Path, scratch: Path, numbers: range, seed: int
) -> Iterator[tuple[Kept, str, str]]:
    """What was damaged, how, and what came of it, for each number."""
    whole: dict[str, bytes] = {}
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        kept = rng.choice(everything)
        if kept.name not in whole:
            code, whole[kept.name], text = made_of(kept, copied(kept, scratch), good, scratch)
            assert code == 0, f"{kept.name} without damage: {text}"
        path = copied(kept, scratch)
        what = damage(kept, path, rng)
        while what.endswith(": nothing"):
            what = damage(kept, path, rng)
        code, result, text = made_of(kept, path, good, scratch)
        if code in (1, 2) and "Traceback (most recent call last)" not in text:
            yield kept, what, "found"
        elif code == 0 and result == whole[kept.name]:
            yield kept, what, "harmless"
        else:
            last = (text.strip().splitlines() or [""])[-1][:150]
            yield kept, what, f"exit code {code}: {last}" if code else "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="where to go on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one damage")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    import torch  # before the forks, which then share it

    torch.set_num_threads(1)
    numbers = range(arguments.first, arguments.first + arguments.damages)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    counts: dict[str, Counter[str]] = {"protected": Counter(), "unprotected": Counter()}
    bad = []
    done = 0
    with tempfile.TemporaryDirectory(prefix="damage-") as name:
        folder = Path(name)
        os.environ["HOME"] = name
        everything = make_all(folder)
        scratch = folder / "scratch"
        scratch.mkdir()
        ends = time.monotonic() + arguments.seconds
        found = outcomes(everything, folder / "good", scratch, numbers, arguments.seed)
        for number, (kept, what, outcome) in zip(numbers, found, strict=False):
            side = "protected" if is_protected(kept) else "unprotected"
            counts[side][outcome if outcome in ("found", "harmless") else "bad"] += 1
            done += 1
            if outcome not in ("found", "harmless"):
                print(f"{number} ({what}): {outcome}", flush=True)
                if side == "protected":
                    bad.append(f"{number} ({what}): {outcome}")
            if time.monotonic() > ends:
                break
    line = {
        "bench": "damage_at_rest",
        "first": numbers[0],
        "damages": done,
        "seed": arguments.seed,
        **{side: dict(count) for side, count in counts.items()},
        "bad": bad,
        "torch": version("torch"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
