"""Power cuts while images are packed, models exported and weights written: what is left is right, or refused.

    python bench/faults/power_loss_outputs.py [--states N] [--seconds S] [--seed S] [--record]

`flambeau pack` into several formats, alone and with --fresh over older files, an export, and weights over
older ones are recorded (recorded_disk.py) and cut off at each of their operations.
A cut leaves any part of the changes of names, and each file that was not synced absent, empty, cut short,
zeroed, with a hole, with what lay there before, or whole, as in power_loss.py, which has the checkpoints.
Bad is: what is read of the output is neither what was to be written nor what lay there before; a file that
lay there before is nowhere; the command has ended, and its output is not there; the same command, or --fresh
where that asks for it, does not make the output; an error that is no message.
In others a write went elsewhere besides, over a file of the whole output: `flambeau verify` finds it, or the
output is read right. export.json has no checksum, so no such write goes there.
Equal states are read once.
tests/test_power_loss_outputs.py runs some.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/recipes/checkpoints"))

import test_checkpoint_faults as faults

import flambeau
from flambeau.data.pack import output_files
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import packed_files, verify_file
from flambeau.data.sources.index_cache import INDEX_SUFFIX
from flambeau.data.sources.open_data import open_parts
from flambeau.errors import DecodeError, InputError
from flambeau.exports.load_export import load_export, verify_export
from flambeau.images.decode import decode
from flambeau.recipes.checkpoints.atomic_checkpoint import save_checkpoint
from flambeau.run.folder.published_weights import Result, are_whole, publish, published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.weights.writer import write_weights
from provenance import commit, cpu_model, record
from recorded_disk import Moment, Recording, Tree, put

REFUSED = (InputError, DecodeError, OSError)
AGAIN = 12  # of so many different states one is continued by the same command; chosen
INDEX = "export.json"


@dataclass(frozen=True)
class Output:
    """One command that writes into a folder, and how its output is read.

    Attributes:
        before: makes what lies there before.
        read: the content; REFUSED if there is none.
        verify: whether `flambeau verify` finds nothing; None where there are no checksums.
        again: what a user does after the cut; None where `write` is not to be repeated.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    before: Callable[[Path], object] = lambda folder: None
    verify: Callable[[Path], bool] | None = None
    again: Callable[[Path], object] | None = None


# ------------------------------------------------------------------ packed images


def make_images(folder: Path, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        for index in range(3):
            pixels = numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.bmp")


def read_images(path: Path) -> list[tuple[str, bytes]]:
    """Class and pixels of each image."""
    source, _ = open_parts(path)
    return sorted(
        (source.classes[label], decode(source.read(index), channels=3).tobytes())
        for index, label in enumerate(source.labels.tolist())
    )


def is_verified(path: Path) -> bool:
    reports = [verify_file(*file) for file in packed_files(path)]
    return not any(report.damaged or report.not_read for report in reports)


def packing(
    data: Path, name: str, how: Conversion, *, shards: int = 1, older: Path | None = None
) -> Output:
    def write(folder: Path, source: Path = data, *, fresh: bool = older is not None) -> None:
        pack(source, folder / name, how, Split(shards=shards), workers=1, fresh=fresh)

    def again(folder: Path) -> None:
        try:
            write(folder, fresh=False)
        except InputError as error:
            assert "--fresh" in str(error), error
            write(folder, fresh=True)

    return Output(
        f"{name}{' --fresh' * (older is not None)}",
        write,
        lambda folder: read_images(folder / name),
        before=lambda folder: older and write(folder, older, fresh=False),
        verify=lambda folder: is_verified(folder / name),
        again=again,
    )


def packings(scratch: Path) -> list[Output]:
    data, older = scratch / "data", scratch / "older"
    make_images(data, 0)
    make_images(older, 1)
    keep, raw, png = Conversion(), Conversion("raw"), Conversion("png")
    return [
        packing(data, "a.rec", keep, shards=2),
        packing(data, "a.tar", png, shards=2),
        packing(data, "a.tfrecord", keep),
        packing(data, "a.npz", raw),
        packing(data, "a.npy", raw),
        packing(data, "folder", keep),
        packing(data, "a.rec", keep, shards=2, older=older),
        packing(data, "a.npy", raw, older=older),
        packing(data, "folder", keep, older=older),
    ]


# ------------------------------------------------------------------ exports and weights


def exporting(images: Path) -> Output:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2)
    )
    preprocess = {"image_size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}

    def write(folder: Path) -> None:
        flambeau.export(
            model,
            sorted(images.rglob("*.bmp")),
            folder / "out",
            preprocess=preprocess,
            classes=["ant", "bee"],
            allow_slower=True,
            say=lambda _: None,
        )

    def read(folder: Path) -> Tree:
        found: Tree = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
        if found not in known:
            load_export(folder / "out")
            known.append(found)
        return found

    known: list[Tree] = []
    return Output(
        "export", write, read, verify=lambda folder: not verify_export(folder / "out").wrong
    )


def read_file(name: str) -> Callable[[Path], bytes]:
    return lambda folder: (folder / name).read_bytes()


def converting(name: str) -> Output:
    def write(folder: Path, value: float = 1.0) -> None:
        write_weights({"a": torch.full((40,), value)}, folder / name, force=True)

    return Output(
        name, write, read_file(name), before=lambda folder: write(folder, 2.0), again=write
    )


def publishing() -> Output:
    """The weights of a run that was extended."""

    def write(folder: Path, step: int = 2) -> None:
        result = Result("last", step, {"accuracy": step / 4})
        publish(RunFolder(folder), [result], name_of=lambda n: f"step-{n:08d}", say=print)

    def before(folder: Path) -> None:
        for step in (1, 2):
            files = {"model.safetensors": bytes([step]) * 200}
            save_checkpoint(folder / "checkpoints" / f"step-{step:08d}", files, meta={"step": step})
        write(folder, 1)

    def read(folder: Path) -> tuple[int, bytes]:
        run = RunFolder(folder)
        result = published(run)
        if result is None or not are_whole(run, result):
            raise InputError("not what the run wrote")
        return result.step, run.weights.read_bytes()

    return Output("published weights", write, read, before=before, again=write)


# ------------------------------------------------------------------ the campaign


class Recorded:
    """An output whose writing was recorded, and the judgement of what a cut leaves of it."""

    def __init__(self, output: Output, scratch: Path) -> None:
        self.output, self._scratch = output, scratch
        folder = scratch / "recorded"
        folder.mkdir()
        output.before(folder)
        self._older = [path.read_bytes() for path in folder.rglob("*") if _is_content(path)]
        self._right = [] if not self._older else [output.read(folder)]
        # The recording sees no sync of a whole file system, but those that stand for it elsewhere.
        with (
            mock.patch.object(output_files, "_sync_file_system", lambda folder: False),
            Recording(folder) as recording,
        ):
            output.write(folder)
        self._right.append(output.read(folder))
        self.moments = recording.moments
        shutil.rmtree(folder)
        self._seen: dict[frozenset[tuple[str, bytes | None]], str] = {}

    @property
    def num_different(self) -> int:
        return len(self._seen)

    def judge(self, tree: Tree, *, returned: bool) -> str:
        """What is wrong with what a cut has left; '' if nothing is."""
        key = frozenset(tree.items())
        if key not in self._seen:
            folder = self._scratch / "left"
            put(tree, folder)
            try:
                is_continued = len(self._seen) % AGAIN == 0
                self._seen[key] = self._wrong(folder, tree, is_continued=is_continued)
            finally:
                shutil.rmtree(folder)
        if returned and self._seen[key] in ("", "refused"):
            return "" if self._seen[key] == "" else "lost although the command had ended"
        return "" if self._seen[key] == "refused" else self._seen[key]

    def _wrong(self, folder: Path, tree: Tree, *, is_continued: bool) -> str:
        contents = list(tree.values())
        lost = sum(content not in contents for content in self._older)
        if lost and not self._replaces:
            return f"{lost} older files are lost"
        try:
            verdict = "" if self.output.read(folder) in self._right else "read wrongly"
        except REFUSED:
            verdict = "refused"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        if is_continued and self.output.again is not None:
            try:
                self.output.again(folder)
                again = self.output.read(folder)
            except Exception as error:
                return f"not continued: {type(error).__name__}: {error}"[:200]
            if again != self._right[-1]:
                return "continued to something else"
        return verdict

    @property
    def _replaces(self) -> bool:
        """Whether the older files are to be replaced, and not set aside."""
        return "--fresh" not in self.output.name

    def misdirect(self, rng: random.Random) -> str | None:
        """What is wrong if a write goes elsewhere in the whole output; None where it changes nothing."""
        tree = self.moments[-1].left(faults.everything, lambda synced, data: data)
        files = [name for name, content in tree.items() if content is not None]
        target = rng.choice([name for name in files if Path(name).name != INDEX])
        source, old = tree[rng.choice(files)], tree[target]
        assert source is not None
        assert old is not None
        at, start = rng.randrange(len(old) + 1), rng.randrange(len(source) + 1)
        written = source[start : start + rng.choice([1, 32, 512])]
        changed = old[:at] + written + old[at + len(written) :]
        if changed == old:
            return None
        folder = self._scratch / "misdirected"
        put({**tree, target: changed}, folder)
        try:
            assert self.output.verify is not None
            if not self.output.verify(folder) or self.output.read(folder) in self._right:
                return ""
            return f"{target} at {at}: verified, and read wrongly"
        except REFUSED:
            return ""
        except Exception as error:
            return f"{target} at {at}: {type(error).__name__}: {error}"[:200]
        finally:
            shutil.rmtree(folder)


def _is_content(path: Path) -> bool:
    """Not an index, which is made anew."""
    return path.is_file() and INDEX_SUFFIX not in path.name


def cuts(moment: Moment, rng: random.Random, samples: int) -> Iterator[Tree]:
    """As `crashes` of test_checkpoint_faults.py."""
    yield moment.left(faults.nothing, lambda synced, data: synced)
    yield moment.left(faults.everything, lambda synced, data: data)
    yield moment.left(faults.everything, lambda synced, data: b"")
    yield moment.left(faults.everything, lambda synced, data: bytes(len(data)))
    yield moment.left(faults.everything, lambda synced, data: data[: len(data) // 2])
    for _ in range(samples):
        yield moment.left(faults.some(rng), faults.some_data(rng))


def campaign(
    outputs: list[Output], scratch: Path, states: int, seed: int, ends: float
) -> tuple[Counter[str], list[str]]:
    """How many states of each kind there were, and those that are bad."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    bad: dict[str, str] = {}
    recorded = [Recorded(output, scratch) for output in outputs]
    total = sum(len(one.moments) for one in recorded)
    samples = max(1, round(states / total) - 5)
    for one in recorded:
        name = one.output.name
        counts["cuts"] += len(one.moments)
        for number, moment in enumerate(one.moments):
            returned = number == len(one.moments) - 1
            for state, tree in enumerate(cuts(moment, rng, samples)):
                if time.monotonic() > ends:
                    break
                counts["kept, dropped or torn"] += 1
                if wrong := one.judge(tree, returned=returned):
                    bad.setdefault(f"{name}: {wrong}", f"seed {seed}, cut {number}, state {state}")
        counts["different"] += one.num_different
        for _ in range(states // 100 if one.output.verify is not None else 0):
            if time.monotonic() > ends:
                break
            wrong_or_none = one.misdirect(rng)
            counts["misdirected"] += wrong_or_none is not None
            if wrong_or_none:
                bad.setdefault(f"{name}: {wrong_or_none}", f"seed {seed}")
    return counts, [f"{what} ({where})" for what, where in bad.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="power-loss-") as name:
        scratch = Path(name)
        outputs = packings(scratch)
        outputs += [exporting(scratch / "data"), publishing()]
        outputs += [converting("weights.safetensors"), converting("weights.pth")]
        counts, bad = campaign(
            outputs, scratch, arguments.states, arguments.seed, started + arguments.seconds
        )
    line = {
        "bench": "power_loss_outputs",
        "states": counts["kept, dropped or torn"] + counts["misdirected"],
        **counts,
        "outputs": [output.name for output in outputs],
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started, 1),
        "bad": bad,
        "torch": version("torch"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
