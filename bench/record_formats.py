"""Random reads a second of encoded images from each format, against a memory map of their bytes.

    python bench/record_formats.py [--images N] [--bytes N] [--reads N] [--rounds N] [--only A,B] [--record]

Payloads are random bytes behind a PNG header, so that nothing compresses them. The page cache is warm: what
is measured is what a format and its reader cost beside the copy. Contenders take turns in each round, each
reading the same images in the same random order; the ratio is to `mmap` of the same round. `flambeau-X` is
the source that `flambeau train` reads; the others are peers' readers as their manuals use them. Time is CPU
time of this one process; bytes are touched by a sum of every 4096th.
"""

import argparse
import importlib.metadata
import json
import mmap
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import torch

from flambeau.data.sources.path_format import open_path
from flambeau.recipes.data.lmdb_records import LMDBWriter
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.recipes.data.tar_shards import TarWriter
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordWriter
from provenance import commit, cpu_model  # beside this script

RESULTS = Path(__file__).parent / "results" / "record_formats.jsonl"
PNG = b"\x89PNG\r\n\x1a\n"
Read = Callable[[int], bytes]


def payloads(count: int, size: int) -> list[bytes]:
    """Between half and one and a half times `size` bytes each."""
    numbers = random.Random(0)
    return [
        PNG + numbers.randbytes(numbers.randrange(size // 2, size * 3 // 2)) for _ in range(count)
    ]


def mapped(folder: Path, images: list[bytes]) -> Read:
    """The limit: one file, its places known."""
    path = folder / "flat.bin"
    path.write_bytes(b"".join(images))
    ends = np.cumsum([len(image) for image in images]).tolist()
    starts = [0, *ends[:-1]]
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return lambda index: view[starts[index] : ends[index]]


def source(path: Path) -> Read:
    opened, _ = open_path(path)
    return opened.read  # type: ignore[return-value]


def of_folder(folder: Path, images: list[bytes]) -> Read:
    for index, image in enumerate(images):
        place = folder / "images" / f"{index % 2}" / f"{index:06}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image)
    read = source(folder / "images")
    order = [index for label in (0, 1) for index in range(label, len(images), 2)]
    place_of = {index: place for place, index in enumerate(order)}
    return lambda index: read(place_of[index])


def of_rec(folder: Path, images: list[bytes]) -> Read:
    with RecordWriter(folder / "a.rec") as writer:
        for index, image in enumerate(images):
            writer.write(pack(IRHeader(0, index % 2, index, 0), image), key=index)
    return source(folder / "a.rec")


def of_tfrecord(folder: Path, images: list[bytes]) -> Read:
    with TFRecordWriter(folder / "a.tfrecord") as writer:
        for index, image in enumerate(images):
            label = torch.tensor([index % 2])
            writer.write(build_example({"image/encoded": [image], "image/class/label": label}))
    return source(folder / "a.tfrecord")


def of_tar(folder: Path, images: list[bytes]) -> Read:
    with TarWriter(folder / "a.tar") as writer:
        for index, image in enumerate(images):
            writer.write(f"{index:06}", {"png": image, "cls": b"%d" % (index % 2)})
    return source(folder / "a.tar")


def of_lmdb(folder: Path, images: list[bytes]) -> Read:
    with LMDBWriter(folder / "a.lmdb") as writer:
        for index, image in enumerate(images):
            writer.write(index, pack(IRHeader(0, index % 2, index, 0), image))
    return source(folder / "a.lmdb")


def lmdb_itself(folder: Path, images: list[bytes]) -> Read:
    environment = lmdb.open(str(folder / "own.lmdb"), map_size=4 * sum(map(len, images)))
    with environment.begin(write=True) as transaction:
        for index, image in enumerate(images):
            transaction.put(b"%08d" % index, image)
    environment.close()
    environment = lmdb.open(str(folder / "own.lmdb"), readonly=True, lock=False, readahead=False)

    def read(index: int) -> bytes:
        with environment.begin() as transaction:
            found: bytes = transaction.get(b"%08d" % index)
        return found

    return read


def h5py_itself(folder: Path, images: list[bytes]) -> Read:
    with h5py.File(folder / "own.h5", "w") as file:
        kind = h5py.vlen_dtype(np.uint8)
        place = file.create_dataset("images", (len(images),), dtype=kind)
        for index, image in enumerate(images):
            place[index] = np.frombuffer(image, np.uint8)
    opened = h5py.File(folder / "own.h5", "r")["images"]
    return lambda index: opened[index].tobytes()


def of_hdf5(folder: Path, images: list[bytes]) -> Read:
    with h5py.File(folder / "a.h5", "w") as file:
        place = file.create_dataset("images", (len(images),), dtype=h5py.vlen_dtype(np.uint8))
        for index, image in enumerate(images):
            place[index] = np.frombuffer(image, np.uint8)
        file["labels"] = np.arange(len(images)) % 2
    return source(folder / "a.h5")


CONTENDERS: dict[str, Callable[[Path, list[bytes]], Read]] = {
    "mmap": mapped, "flambeau-rec": of_rec, "flambeau-tfrecord": of_tfrecord, "flambeau-tar": of_tar,
    "flambeau-lmdb": of_lmdb, "lmdb": lmdb_itself, "flambeau-hdf5": of_hdf5, "h5py": h5py_itself,
    "flambeau-folder": of_folder,
}  # fmt: skip


def time_of(read: Read, order: list[int]) -> float:
    start, total = time.process_time(), 0
    for index in order:
        total += sum(bytes(read(index))[::4096])
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=20_000, help="of an image, on average")
    parser.add_argument("--reads", type=int, default=5000, help="a contender and round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    names = list(dict.fromkeys(["mmap", *options.only.split(",")]))
    images, numbers = payloads(options.images, options.bytes), random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        reads = {}
        for name in names:
            (Path(folder) / name).mkdir()
            reads[name] = CONTENDERS[name](Path(folder) / name, images)
            for index in (0, 1, options.images - 1):
                assert bytes(reads[name](index)) == images[index], name
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds + 1):
            order = [numbers.randrange(options.images) for _ in range(options.reads)]
            turn = numbers.sample(names, len(names))
            found = {name: time_of(reads[name], order) for name in turn}
            rounds.append(found)
        reads.clear()
    lines = [line(name, rounds[1:], options) for name in names]
    print("\n".join(lines))
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in lines)


def line(name: str, rounds: list[dict[str, float]], options: argparse.Namespace) -> str:
    rates = [options.reads / one[name] for one in rounds]
    ratios = sorted(one["mmap"] / one[name] for one in rounds)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    package = {"lmdb": "lmdb", "h5py": "h5py"}.get(name, "flambeau")
    facts: dict[str, Any] = {
        "contender": name, "reads_per_s": round(statistics.median(rates)), "ratio": round(middle, 3),
        "ratio_p25": round(low, 3), "ratio_p75": round(high, 3), "n": len(rounds),
        "bytes_per_image": options.bytes, "images": options.images,
        "version": importlib.metadata.version(package), "python": platform.python_version(),
        "cpu": cpu_model(), "commit": commit(),
        "command": "python bench/record_formats.py",
    }  # fmt: skip
    return json.dumps(facts)


if __name__ == "__main__":
    main()
