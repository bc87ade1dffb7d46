"""Every parser that believes a length, given many damaged inputs: what is raised, hangs or takes memory.

    python bench/faults/fuzz_parsers.py [--parser NAME ...] [--executions N] [--seconds S] [--seed S]
                                        [--state FOLDER] [--record]
    python bench/faults/fuzz_parsers.py --parser NAME --input BASE64

Inputs are made from what our own writers wrote, guided by coverage where atheris is installed (`pip install
atheris`), else by changes at random.
Where a checksum would end every input at once, it is made right in three of four.
`kernel` is the C code of JPEG and PNG under AddressSanitizer and UBSan, with libFuzzer (`apt install clang`).
Bad is: an exception that is not the parser's own for bad files, a signal, more than 2 s, more than 512 MiB.
Each bad input is in the line, by which --input makes it again.
A later call with the same --state goes on: executions add up until there are N of each parser.
tests/test_fuzz_parsers.py runs some hundred of each.
"""

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile_files import flipped, with_a_length
from provenance import commit, cpu_model, record

ROOT = Path(__file__).parents[2]
LONGEST_S = 2
MOST_BYTES = 512 * 2**20
LONGEST_INPUT = 8192
MOST_KEPT = 20  # bad inputs of a parser, each with another cause
KERNEL = "kernel"


@dataclass(frozen=True)
class Parser:
    """What reads a file at a path, valid files, the errors it may raise, and how checksums are made right."""

    read: Callable[[Path], object]
    seeds: Callable[[Path], list[bytes]]
    refusals: tuple[type[Exception], ...]
    mended: Callable[[bytes], bytes] | None = None
    name: str = "file"


@dataclass
class Found:
    """What is known of a parser; `bad` has an input by cause."""

    executions: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    bad: dict[str, str] = field(default_factory=dict)

    def note(self, cause: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        if len(self.bad) < MOST_KEPT or cause in self.bad:
            self.bad[cause] = min(self.bad.get(cause, text), text, key=len)


class Hang(BaseException):
    """An input took too long; no parser may catch it."""


# ------------------------------------------------------------------ the parsers


def _written(folder: Path, *makers: Callable[[Path], object]) -> list[bytes]:
    found = []
    for number, make in enumerate(makers):
        path = folder / f"seed{number}"
        make(path)
        found.append(path.read_bytes())
        path.unlink()
    return found


def record_parsers() -> dict[str, Parser]:
    """Formats of records: their readers read all of them."""
    from flambeau.recipes.checkpoints.safe_pickle import PickleRefused, plain_pickle
    from flambeau.recipes.data import lmdb_records, recordio, tf_example, tfrecord

    def rec(path: Path) -> None:
        with recordio.RecordReader(path) as reader:
            for one in reader:
                with contextlib.suppress(recordio.RecordError):
                    recordio.unpack(one)

    def rec_seed(path: Path) -> None:
        with recordio.RecordWriter(path, index_path=False) as writer:
            header = recordio.IRHeader(0, [1.0, 2.0], 7, 0)
            writer.write(recordio.pack(header, b"an image"))
            writer.write(b"\x0a\x23\xd7\xce" * 3)

    def index(path: Path) -> None:
        whole = path.with_name("whole.rec")
        if not whole.exists():
            with recordio.RecordWriter(whole, index_path=False) as writer:
                for size in (1, 20, 300):
                    writer.write(b"x" * size)
        with recordio.RecordReader(whole, path) as reader:
            for _ in reader:
                pass

    def tfr(path: Path) -> None:
        with tfrecord.TFRecordReader(path) as reader:
            for one in reader:
                example(one)

    def example(data: bytes) -> None:
        try:
            tf_example.parse_example(data)
        except ValueError as error:
            if type(error) is not ValueError:
                raise

    features = {"image": b"abc", "label": [3, -1], "x": [0.5, 2.0]}
    example_seed = tf_example.build_example(features)

    def tfr_seed(path: Path) -> None:
        with tfrecord.TFRecordWriter(path) as writer:
            writer.write(example_seed)
            writer.write(b"")

    def tfr_mended(data: bytes) -> bytes:
        made = bytearray(data)
        at = 0
        while at + 16 <= len(made):
            made[at + 8 : at + 12] = _masked(bytes(made[at : at + 8]), tfrecord.crc32c)
            end = at + 12 + int.from_bytes(made[at : at + 8], "little")
            if end + 4 > len(made):
                break
            made[end : end + 4] = _masked(bytes(made[at + 12 : end]), tfrecord.crc32c)
            at = end + 4
        return bytes(made)

    def lmdb(path: Path) -> None:
        with lmdb_records.LMDBReader(path) as reader:
            for one in reader:
                assert isinstance(one, bytes)

    def lmdb_seed(path: Path) -> None:
        with lmdb_records.LMDBWriter(path) as writer:
            for number in range(3):
                writer.write(f"key{number}", b"x" * number)
        page = (path / "data.mdb") if path.is_dir() else path
        content = page.read_bytes()
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(content)

    import pickle

    pickles = [
        pickle.dumps((b"image", [3, "cat"], {"a": 1.5, (1, 2): None}), protocol=number)
        for number in (0, 2, 4, 5)
    ]
    return {
        "recordio": Parser(rec, lambda at: _written(at, rec_seed), (recordio.RecordError,)),
        "recordio_index": Parser(
            index, lambda _: [b"0\t0\n1\t12\n2\t40\n"], (recordio.RecordError,)
        ),
        "tfrecord": Parser(
            tfr, lambda at: _written(at, tfr_seed), (tfrecord.TFRecordError,), tfr_mended
        ),
        "tf_example": Parser(
            lambda path: example(path.read_bytes()), lambda _: [example_seed], ()
        ),
        "lmdb": Parser(lmdb, lambda at: _written(at, lmdb_seed), (lmdb_records.LMDBError,)),
        "pickle": Parser(
            lambda path: plain_pickle(path.read_bytes()), lambda _: pickles, (PickleRefused,)
        ),
    }  # fmt: skip


def _masked(data: bytes, crc32c: Callable[[bytes], int]) -> bytes:
    crc = crc32c(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def archive_parsers() -> dict[str, Parser]:
    """Archives and arrays."""
    import numpy as np
    import torch

    from flambeau.data.sources import shard_index, zip_members
    from flambeau.data.sources.tar_file import open_tar
    from flambeau.errors import InputError
    from flambeau.recipes.checkpoints import safe_pickle
    from flambeau.recipes.data import mapped_arrays, tar_shards
    from flambeau.weights.npz_file import read_npz

    def tar(path: Path) -> None:
        reader = tar_shards.TarReader(path)
        for sample in range(len(reader)):
            assert reader[sample]

    def tar_seed(path: Path) -> None:
        with tar_shards.TarWriter(path) as writer:
            writer.write("0001", {"jpg": b"an image", "cls": b"3"})

    def tar_mended(data: bytes) -> bytes:
        made = bytearray(data)
        for at in range(0, len(made) - 511, 512):
            if made[at + 257 : at + 262] == b"ustar":
                made[at + 148 : at + 156] = b" " * 8
                made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
        return bytes(made)

    def pax(path: Path) -> None:
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo("\u00fc" * 60 + ".png")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"png"))

    def zipped(path: Path) -> None:
        reader = zip_members.ZipReader(path, zip_members.index_zip(path))
        for sample in range(len(reader)):
            assert reader[sample]

    def zip_seed(path: Path) -> None:
        import zipfile

        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/1.png", b"png")
            archive.writestr("b/2.png", b"png" * 9, zipfile.ZIP_DEFLATED)

    def index_seed(path: Path) -> None:
        shard = path.with_suffix(".tar")
        tar_seed(shard)
        index = shard_index.index_shard(shard, open_tar(shard), where="seed")
        path.write_bytes(shard_index.write_index([index]))
        shard.unlink()

    def npy(path: Path) -> None:
        with contextlib.suppress(TypeError):  # text, objects, records
            mapped_arrays.map_npy(path).sum()

    def npy_seed(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, np.ones((2, 3)))

    def npz(path: Path) -> None:
        read_npz(path)
        mapped_arrays.map_npz(path)

    def npz_seed(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, a=np.arange(6).reshape(2, 3), b=np.ones(2, np.float16))

    def pth(path: Path) -> None:
        safe_pickle.pickle_contents(path)
        safe_pickle.load_pickle(path, drop_objects=True)

    state = {"model": {"w": torch.ones(2, 3)}, "lr": 0.1, "ints": torch.arange(4)}
    pths = (
        lambda path: torch.save(state, path),
        lambda path: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda path: torch.save(torch.nn.Linear(1, 1), path),
    )
    refused = (safe_pickle.PickleRefused,)
    return {
        "tar": Parser(
            tar, lambda at: _written(at, tar_seed, pax), (tar_shards.ShardError,), tar_mended
        ),
        "zip": Parser(zipped, lambda at: _written(at, zip_seed), (tar_shards.ShardError,)),
        "shard_index": Parser(
            lambda path: shard_index.read_index(path.read_bytes(), "the index"),
            lambda at: _written(at, index_seed),
            (InputError,),
        ),
        "npy": Parser(
            npy,
            lambda at: _written(at, npy_seed),
            (ValueError,),
        ),
        "npz": Parser(npz, lambda at: _written(at, npz_seed), (ValueError, InputError)),
        "pth": Parser(pth, lambda at: _written(at, *pths), refused),
    }  # fmt: skip


def text_parsers() -> dict[str, Parser]:
    """Settings, lines, tables, and what lies beside weights."""
    import torch
    from safetensors.torch import save

    from flambeau.data.sources.listing import ListingSource
    from flambeau.errors import InputError
    from flambeau.recipes.checkpoints.atomic_checkpoint import (
        MANIFEST,
        CheckpointDamaged,
        read_checkpoint,
        save_checkpoint,
        verify_checkpoint,
    )
    from flambeau.run.folder.json_file import dataset_facts, metrics_row
    from flambeau.trainer.settings.stored_settings import read_config
    from flambeau.weights.safetensors_file import check_header, read_safetensors

    def tensors(path: Path) -> None:
        check_header(path)
        for tensor in read_safetensors(path).values():
            tensor.sum() if tensor.dtype.is_floating_point else tensor.shape

    def lines(path: Path) -> None:
        for line in path.read_bytes().split(b"\n"):
            metrics_row(line)
        dataset_facts(path)

    def manifest(path: Path) -> None:
        folder = path.parent
        if not (folder / "a").exists():
            (folder / "a").write_bytes(b"hello")
        verify_checkpoint(folder)
        read_checkpoint(folder)

    def manifest_seed(path: Path) -> None:
        folder = path.with_name("step-00000001")
        save_checkpoint(folder, {"a": b"hello"}, meta={"step": 1})
        path.write_bytes((folder / MANIFEST).read_bytes())
        shutil.rmtree(folder)

    def sealed(data: bytes) -> bytes:
        head = data[:-68]
        return head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'

    facts = {
        "classes": ["a", "b"], "channels": 1, "mean": [0.5], "std": [0.2], "train_samples": 3,
        "val_samples": 1, "train_fingerprint": "x", "val_fingerprint": "y", "model_file_sha256": None,
    }  # fmt: skip
    weights = save({"w": torch.ones(2, 3), "n": torch.arange(3)}, {"format": "pt"})
    tables = [
        b"path,label,split\na.png,cat,train\nb.png,dog,val\n",
        b'image;target\n"a;1.png";3\nb.png;4\n',
        b"a.png\tcat\nb.png\tdog\n",
    ]
    settings = (
        b'model = "tiny_convnet"\nlr = 0.1\nepochs = 1\nlr-schedule = "cosine"\n[a.b]\nc = [1, 2]\n'
    )
    return {
        "safetensors": Parser(tensors, lambda _: [weights], (InputError,)),
        "json": Parser(
            lines,
            lambda _: [json.dumps(facts).encode(), b'{"step": 1, "loss": 0.5}\n{"step": 2}\n'],
            (ValueError,),
        ),
        "toml": Parser(read_config, lambda _: [settings], (InputError,)),
        "csv": Parser(
            lambda path: ListingSource(path, are_here=False),
            lambda _: tables,
            (InputError,),
            name="file.csv",
        ),
        "manifest": Parser(
            manifest,
            lambda at: _written(at, manifest_seed),
            (CheckpointDamaged,),
            sealed,
            name=MANIFEST,
        ),
    }


def image_parsers() -> dict[str, Parser]:
    """Headers of images, and the pixels of PNG; the decoders of JPEG are C: see `kernel`."""
    import numpy as np
    from PIL import Image

    from flambeau.errors import DecodeError
    from flambeau.images import exif_orientation, png, stacked_tiff, tiff
    from flambeau.images.jpeg import headers
    from flambeau.images.pillow_messages import silence_warnings

    silence_warnings()
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6

    def saved(picture: Image.Image, kind: str, **settings: Any) -> bytes:
        file = io.BytesIO()
        picture.save(file, kind, **settings)
        return file.getvalue()

    def read_png(path: Path) -> None:
        data = path.read_bytes()
        header = png.read_header(data)
        if header is not None and header.height * header.width <= 1 << 20:
            png.first_rows(data, header, header.height)
            png.first_rows(data, header, (header.height + 1) // 2)
        png.indices(data)
        png.without_texts(data)

    def png_mended(data: bytes) -> bytes:
        made = bytearray(data)
        at = 8
        while at + 12 <= len(made):
            end = at + 8 + int.from_bytes(made[at : at + 4])
            if end + 4 > len(made):
                break
            made[end : end + 4] = zlib.crc32(made[at + 4 : end]).to_bytes(4)
            at = end + 4
        return bytes(made)

    def read_tiff(path: Path) -> None:
        data = path.read_bytes()
        tiff.require_known(data)
        stacked_tiff.read_header(data)

    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_text("Comment", "x" * 40, zip=True)
    texts.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>', zip=True)
    stacked = saved(image, "TIFF", save_all=True, append_images=[image])
    return {
        "png": Parser(
            read_png,
            lambda _: [
                saved(image, "PNG"),
                saved(image.convert("L"), "PNG", pnginfo=texts, exif=exif),
                saved(image.quantize(16), "PNG"),
            ],
            (),
            png_mended,
        ),
        "jpeg_header": Parser(
            lambda path: headers.read_header(path.read_bytes()),
            lambda _: [
                saved(image, "JPEG", exif=exif),
                saved(image, "JPEG", progressive=True),
                saved(image.convert("L"), "JPEG"),
            ],
            (),
        ),
        "tiff": Parser(
            read_tiff,
            lambda _: [saved(image, "TIFF"), stacked, saved(image.convert("RGBA"), "TIFF")],
            (DecodeError,),
        ),
        "exif": Parser(
            lambda path: exif_orientation.exif_orientation(path.read_bytes()),
            lambda _: [exif.tobytes()],
            (),
        ),
    }


def parsers() -> dict[str, Parser]:
    """All that are read by Python, cheap ones first."""
    return {**record_parsers(), **text_parsers(), **image_parsers(), **archive_parsers()}


# ------------------------------------------------------------------ one input, and many


def given(parser: Parser, data: bytes) -> bytes:
    """What the parser gets: in three of four the checksums are those of the changed bytes."""
    return parser.mended(data) if parser.mended and zlib.crc32(data) % 4 else data


def complaint(parser: Parser, data: bytes, folder: Path) -> str | None:
    """What is bad about reading these bytes, in words that are equal for an equal cause."""
    path = folder / parser.name
    path.write_bytes(data)
    started = time.process_time()  # not of the clock: the machine may do something else
    try:
        parser.read(path)
    except Hang:
        return _cause("hang", sys.exc_info()[2])
    except Exception as error:
        # Also a subclass is another error, unless it is ours: UnicodeDecodeError is a ValueError.
        is_ours = type(error).__module__.startswith("flambeau")
        fits = isinstance(error, parser.refusals) and (is_ours or type(error) in parser.refusals)
        if not fits:
            return _cause(type(error).__name__, error.__traceback__)
    if time.process_time() - started > LONGEST_S:
        return "hang: it ended by itself"
    return None


def _cause(what: str, trace: Any) -> str:
    frames = [one for one in traceback.extract_tb(trace) if "flambeau" in one.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    return f"{what} in {where}"


def changed(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One or more changes at random, as a fuzzer makes them without coverage."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 4, 16, 100]))
        other = rng.choice(others)
        way = rng.randrange(7)
        if way == 0:
            data = flipped(data, rng)
        elif way == 1:
            data = with_a_length(data, rng)
        elif way == 2:
            data = data[:at]
        elif way == 3:
            data = data[:at] + data[end:]
        elif way == 4:
            data = data[:at] + rng.randbytes(rng.choice([1, 4, 16])) + data[at:]
        elif way == 5:
            data = data[:at] + data[at:end] * rng.choice([2, 3, 50]) + data[end:]
        else:
            data = data[:at] + other[rng.randrange(len(other) + 1) :]
    return data[:LONGEST_INPUT]


def fuzz_by_chance(parser: Parser, executions: int, *, seed: int, deadline: float) -> Found:
    """Read so many inputs, or those that fit before `deadline` of time.monotonic()."""
    found = Found()
    rng = random.Random(seed)

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with _scratch() as folder:
            seeds = parser.seeds(folder)
            for data in seeds:
                if cause := complaint(parser, data, folder):
                    raise AssertionError(f"a valid file: {cause}")
            idle = _peak_bytes()
            while found.executions < executions and time.monotonic() < deadline:
                data = given(parser, changed(rng.choice(seeds), seeds, rng))
                signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
                try:
                    cause = complaint(parser, data, folder)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                found.executions += 1
                if cause:
                    found.note(cause, data)
                if _peak_bytes() - idle > max(found.peak_bytes, MOST_BYTES):
                    found.note(f"more than {MOST_BYTES >> 20} MiB", data)
                found.peak_bytes = max(found.peak_bytes, _peak_bytes() - idle)
    finally:
        signal.signal(signal.SIGALRM, before)
    return found


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="fuzz-", dir=memory if memory.is_dir() else None
    ) as folder:
        yield Path(folder)


# ------------------------------------------------------------------ in a process of its own


def child(name: str, state: Path, executions: int, seconds: float, seed: int) -> None:
    """Fuzz one parser and leave what was found in `state`; it ends the process."""
    file = state / f"{name}.now.json"
    if importlib.util.find_spec("atheris") is None:
        parser = parsers()[name]
        deadline = time.monotonic() + seconds
        found = fuzz_by_chance(parser, executions, seed=seed, deadline=deadline)
        file.write_text(json.dumps(dataclasses.asdict(found)))
        return
    import atheris

    with atheris.instrument_imports(include=["flambeau", "tomllib", "zipfile", "tarfile"]):
        parser = parsers()[name]
    found = Found()
    corpus = state / name
    scratch = _scratch()
    folder = scratch.__enter__()
    if not corpus.is_dir():
        corpus.mkdir()
        for number, data in enumerate(parser.seeds(folder)):
            (corpus / f"seed{number}").write_bytes(data)
    idle = _peak_bytes()
    deadline = time.monotonic() + seconds

    def keep() -> None:
        file.write_text(json.dumps(dataclasses.asdict(found)))

    def one_input(data: bytes) -> None:
        data = given(parser, data)
        cause = complaint(parser, data, folder)
        found.executions += 1
        if cause:
            found.note(cause, data)
        if found.executions % 256 and not cause:
            return
        peak = _peak_bytes() - idle
        if peak > max(found.peak_bytes, MOST_BYTES):
            found.note(f"more than {MOST_BYTES >> 20} MiB, here or a little before", data)
        found.peak_bytes = max(found.peak_bytes, peak)
        if found.executions >= executions or time.monotonic() > deadline:
            keep()
            scratch.__exit__(None, None, None)
            os._exit(0)
        if found.executions % 4096 == 0:
            keep()

    options = {"timeout": 10, "rss_limit_mb": 4096, "max_len": LONGEST_INPUT, "seed": seed + 1}
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(
        [sys.argv[0], *words, f"-artifact_prefix={state}/{name}-", str(corpus)], one_input
    )
    atheris.Fuzz()


def fuzz(name: str, state: Path, executions: int, seconds: float, seed: int) -> Found:
    """What was found of a parser now and by earlier calls with this `state`."""
    kept = state / f"{name}.json"
    total = Found(**json.loads(kept.read_text())) if kept.exists() else Found()
    deadline = time.monotonic() + seconds
    for attempt in range(5):  # a signal or a hang ends the process
        left = executions - total.executions
        remaining = deadline - time.monotonic()
        if left <= 0 or remaining < 1:
            break
        started = time.monotonic()
        now = state / f"{name}.now.json"
        now.unlink(missing_ok=True)
        run_seed = seed + total.executions + attempt
        if name == KERNEL:
            done = fuzz_kernel(state, left, remaining, run_seed, now)
        else:
            words = ["--child", name, "--state", str(state), "--executions", str(left)]
            words += ["--seconds", str(remaining), "--seed", str(run_seed)]
            done = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, check=False
            )
        if now.exists():
            part = Found(**json.loads(now.read_text()))
            total.executions += part.executions
            total.peak_bytes = max(total.peak_bytes, part.peak_bytes)
            for cause, text in part.bad.items():
                total.note(cause, base64.b64decode(text))
        total.seconds += time.monotonic() - started
        for artifact in state.glob(f"{name}-*"):
            why = re.findall(r"(?:ERROR|runtime error): (.*)", done.stderr)
            total.note(
                f"{artifact.name.split('-')[1]}: {' '.join(why[:1])}"[:200], artifact.read_bytes()
            )
            artifact.unlink()
        kept.write_text(json.dumps(dataclasses.asdict(total)))
        if done.returncode and not total.bad:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        if not done.returncode:
            break
    return total


# ------------------------------------------------------------------ the C kernel


def build_kernel(folder: Path, *, compiler: str = "clang") -> Path:
    """The kernel with both sanitizers: libFuzzer's program with clang, else one that reads named files."""
    native = ROOT / "src/flambeau/images/native"
    program = folder / "fuzz_kernel"
    fuzzer = ["-fsanitize=fuzzer"] if "clang" in compiler else ["-DREAD_FILES"]
    subprocess.run(
        [
            compiler, "-std=c11", "-g", "-O1", "-ffp-contract=off", "-fno-omit-frame-pointer",
            "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *fuzzer, f"-I{native}",
            "-o", str(program), str(Path(__file__).with_name("fuzz_kernel.c")),
            *sorted(str(path) for path in native.glob("*.c")), "-lm",
        ],
        check=True,
    )  # fmt: skip
    return program


def kernel_seeds() -> list[bytes]:
    """JPEG files of all kinds that the kernel reads, cut into segments and not, after bytes of settings."""
    import numpy as np
    from PIL import Image

    from flambeau.images.jpeg.scan_segments import segment

    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3)).astype(np.uint8)
    found = []
    for picture in (Image.fromarray(pixels), Image.fromarray(pixels).convert("L")):
        for settings in ({}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}):
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=50, **settings)
            found += [file.getvalue(), segment(file.getvalue(), interval_px=16)]
    return [
        bytes([0, number % 16, 3, 9, number, 5, 7, 2]) + data for number, data in enumerate(found)
    ]


def fuzz_kernel(
    state: Path, executions: int, seconds: float, seed: int, now: Path
) -> subprocess.CompletedProcess[str]:
    corpus = state / KERNEL
    if not corpus.is_dir():
        corpus.mkdir()
        for number, data in enumerate(kernel_seeds()):
            (corpus / f"seed{number}").write_bytes(data)
    clang = next((one for one in ("clang", "clang-14") if shutil.which(one)), None)
    if clang is None:
        raise SystemExit("libFuzzer comes with clang: apt install clang")
    program = build_kernel(state, compiler=clang)
    options = {
        "runs": executions, "max_total_time": int(seconds), "seed": seed + 1, "timeout": LONGEST_S,
        "rss_limit_mb": 2048, "max_len": LONGEST_INPUT, "print_final_stats": 1,
        "artifact_prefix": f"{state}/{KERNEL}-",
    }  # fmt: skip
    done = subprocess.run(
        [program, *(f"-{name}={value}" for name, value in options.items()), corpus],
        capture_output=True,
        text=True,
        check=False,
    )
    stats = dict(re.findall(r"stat::(\w+): +(\d+)", done.stderr))
    peak = int(stats.get("peak_rss_mb", 0)) * 2**20
    found = Found(int(stats.get("number_of_executed_units", 0)), peak_bytes=peak)
    now.write_text(json.dumps(dataclasses.asdict(found)))
    return done


def again(name: str, data: bytes, state: Path) -> str | None:
    """What is bad about one input."""
    if name != KERNEL:
        with _scratch() as folder:
            return complaint(parsers()[name], data, folder)
    program = build_kernel(state, compiler="gcc")
    (state / "input").write_bytes(data)
    done = subprocess.run([program, state / "input"], capture_output=True, text=True, check=False)
    return done.stderr[:2000] if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parser", nargs="+", default=[], help="by default all")
    parser.add_argument("--executions", type=int, default=10**6, help="of each")
    parser.add_argument("--seconds", type=float, default=60, help="of each, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / "build/fuzz_parsers")
    parser.add_argument("--input", help="base64 of one input of one parser")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    arguments.state.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        how_much = arguments.executions, arguments.seconds, arguments.seed
        child(arguments.child, arguments.state, *how_much)
        return
    names = arguments.parser or [*parsers(), KERNEL]
    if arguments.input:
        cause = again(names[0], base64.b64decode(arguments.input), arguments.state)
        raise SystemExit(cause)
    guided = importlib.util.find_spec("atheris") is not None
    of = commit()  # before the first line of it is a change
    for name in names:
        found = fuzz(name, arguments.state, arguments.executions, arguments.seconds, arguments.seed)
        line = {
            "bench": "fuzz_parsers",
            "parser": name,
            "executions": found.executions,
            "guided_by_coverage": guided or name == KERNEL,
            "seed": arguments.seed,
            "seconds": round(found.seconds, 1),
            "peak_mib": round(found.peak_bytes / 2**20, 1),
            "crashes": sum("hang" not in cause for cause in found.bad),
            "hangs": sum("hang" in cause for cause in found.bad),
            "bad": found.bad,
            "torch": version("torch"),
            "processor": cpu_model(),
            "commit": of,
        }
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
