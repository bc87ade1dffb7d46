"""An export of a run on 16-bit images reads their levels as the run does, or refuses them as it does."""

import io
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.transforms.crops import eval_image
from flambeau.errors import DecodeError
from flambeau.exports.resize_in_graph import ResizedCentre
from flambeau.exports.standalone.preprocess import Preprocessing
from flambeau.images.decode import Picture, decode
from refused import refused

SIDES = [(40, 61), (28, 28), (3, 300), (97, 33)]
SHORT = "--epochs 6 --batch-size 8 --model tiny_convnet --precision fp32 --image-size 24"


def preprocessing(folder: Path, pixels: str, channels: int, **told: Any) -> Preprocessing:
    told = {"classes": ["a"], "image_size": 28, "resized_shorter_side": 32, **told}
    told |= {"pixels": pixels, "mean": [200.0] * channels, "std": [40.0] * channels}
    told.setdefault("interpolation", "bilinear")
    folder.joinpath("export.json").write_text(json.dumps(told))
    return Preprocessing(folder)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_levels_are_resized_as_in_an_evaluation(tmp_path: Path, interpolation: str) -> None:
    rng = np.random.default_rng(0)
    reader = preprocessing(tmp_path, "uint16", 3, interpolation=interpolation)
    for height, width in SIDES:
        levels = rng.integers(0, 65536, (height, width, 3)).astype(np.float32)
        wanted = eval_image(levels, 28, interpolation=interpolation)
        full = torch.tensor([height, width])
        [got] = ResizedCentre(28, interpolation)(torch.from_numpy(levels)[None], full)
        np.testing.assert_allclose(got.permute(1, 2, 0).numpy(), wanted, rtol=1e-4, atol=0.05)
        prepared = reader.prepare(levels, full)
        np.testing.assert_allclose(prepared, wanted, rtol=1e-4, atol=0.05)


def png(levels: NDArray[Any], hidden: NDArray[Any]) -> bytes:
    """A PNG of 16 bits in which one color is transparent."""

    def chunk(name: bytes, body: bytes) -> bytes:
        head = struct.pack(">I", len(body)) + name + body
        return head + struct.pack(">I", zlib.crc32(name + body))

    height, width, channels = levels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    parts = [chunk(b"IHDR", header), chunk(b"tRNS", hidden.astype(">u2").tobytes())]
    parts += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def files() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    for channels in (1, 3, 4):
        levels = rng.integers(0, 65536, (20, 27, channels)).astype(np.uint16)
        yield f"{channels} channels", cv2.imencode(".png", levels)[1].tobytes()
        if channels < 4:
            levels[5:9] = levels[0, 0]
            yield f"{channels} channels, one transparent", png(levels, levels[0, 0])
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("PNG", "TIFF"):
            file = io.BytesIO()
            Image.fromarray(levels[:, :, 0]).save(file, suffix, exif=exif)
            yield f"{suffix}, orientation {orientation}", file.getvalue()
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("imagecodecs")
    extras: list[Any] = ["unspecified", "unassalpha", "assocalpha"]
    for depth, color, planes, packed, extra, order in itertools.product(
        ("u1", "u2", "i1"),
        ("minisblack", "miniswhite", "rgb", "separated", "cielab", "ycbcr"),
        ("contig", "separate"),
        (None, "lzw"),
        (None, *extras),
        "<>",
    ):
        samples = {"minisblack": 1, "miniswhite": 1, "separated": 4}.get(color, 3) + bool(extra)
        x = rng.integers(0, np.iinfo(depth).max, (20, 27, samples)).astype(depth)
        settings: dict[str, Any] = {"photometric": color, "compression": packed, "byteorder": order}
        if samples > 1:
            settings["planarconfig"] = planes
        x = x[:, :, 0] if samples == 1 else np.moveaxis(x, 2, 0) if planes == "separate" else x
        if extra:
            settings["extrasamples"] = (extra,)
        file = io.BytesIO()
        tifffile.imwrite(file, np.ascontiguousarray(x), metadata=None, **settings)
        yield f"TIFF {depth} {settings} {extra}", file.getvalue()
    for color in ("minisblack", "miniswhite"):
        x = rng.integers(0, 4096, (20, 27)).astype("u2")
        file = io.BytesIO()
        tifffile.imwrite(file, x, metadata=None, bitspersample=12, photometric=color)
        yield f"TIFF of 12 bits, {color}", file.getvalue()


@pytest.mark.parametrize("pixels", ["uint8", "uint16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_are_read_to_the_pixels_of_the_run_or_refused_as_there(
    tmp_path: Path, pixels: str, channels: int
) -> None:
    reader = preprocessing(tmp_path, pixels, channels)
    read = refused = 0
    for name, data in files():
        try:
            stored = data if pixels == "uint8" else Picture(data).levels()
            wanted = decode(stored, channels=channels)
        except DecodeError:
            with pytest.raises((ValueError, OSError)):
                reader.read_image(io.BytesIO(data))
            refused += 1
            continue
        got, full_size = reader.read_image(io.BytesIO(data))
        assert got.dtype == (np.uint8 if pixels == "uint8" else np.float32)
        np.testing.assert_array_equal(got, wanted, err_msg=name)
        assert tuple(full_size) == got.shape[:2]
        read += 1
    assert read > 20
    assert refused > 20


def test_an_export_refuses_floating_point_pixels(
    flambeau: Any, exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run takes those of 0 .. 1; as 8 bits all of them would be black."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "import numpy as np\n\nclass Own:\n    classes = ['stripes', 'waves', 'tiles']\n"
        "    targets = [0, 1, 2]\n\n    def __len__(self):\n        return 3\n\n"
        "    def __getitem__(self, k):\n"
        "        return np.random.default_rng(k).random((32, 32, 3), 'f4'), k\n\n"
        "def data():\n    return Own()\n"
    )
    flags = "--format safetensors --allow-slower --out shipped"
    assert flambeau("export", exported_run, flags).code == 0
    assert flambeau("evaluate", exported_run, "own.py:data").code == 0
    refused(flambeau("evaluate shipped own.py:data"), "8 bits", "floating-point")


@pytest.fixture
def run(flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on 12 bits in files of 16, half of them with a square that 8 bits do not hold."""
    monkeypatch.chdir(tmp_path)
    levels = 200 + np.random.default_rng(0).normal(0, 20, (24, 34, 30, 3))
    levels[1::2, 10:22, 10:22] += 120
    for number, pixels in enumerate(levels.clip(0, 4095).astype(np.uint16)):
        path = Path("data", "ab"[number % 2], f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels)
    assert flambeau("train data --out run", SHORT).code == 0
    return Path("run")


def answers(flambeau: Any, folder: str) -> dict[str, tuple[str, float]]:
    lines = flambeau(f"predict {folder} data --json --top 1").out.splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        Path(row["image"]).name: (row["classes"][0]["class"], row["classes"][0]["probability"])
        for row in rows
    }


def equal(
    got: dict[str, tuple[str, float]], wanted: dict[str, tuple[str, float]], off: float
) -> None:
    assert got.keys() == wanted.keys()
    for name, (best, share) in wanted.items():
        assert got[name] == (best, pytest.approx(share, abs=off)), name


@pytest.mark.parametrize(
    "format_",
    [
        "safetensors",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("torch-export", "onnx")),
    ],
)
def test_an_export_answers_as_the_run(
    flambeau: Any, run: Path, run_python: Any, format_: str
) -> None:
    exported = flambeau("export run --out shipped --allow-slower --format", format_)
    assert exported.code == 0, exported.err
    wanted = answers(flambeau, "run")
    equal(answers(flambeau, "shipped"), wanted, 2e-5)
    files = sorted(map(str, Path("data").rglob("*.png")))
    done = run_python("shipped/example.py", *files)
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(": ") for line in done.stdout.splitlines()]
    told = {Path(file).name: answer.split() for file, _, answer in lines}
    equal({name: (best, float(share)) for name, (best, share) in told.items()}, wanted, 2e-5)
    assert flambeau("verify shipped").code == 0
    assert flambeau("evaluate shipped data --all").code == 0
    assert "float32, levels 0 .. 65535" in Path("shipped/README.md").read_text()
