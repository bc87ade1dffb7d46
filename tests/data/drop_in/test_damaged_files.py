"""`fast(loader)` on damaged files: what PIL raises is raised where PIL raises it, or the pixels are PIL's."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1

from flambeau.data.fast import fast

UPPER_LEFT = v1.Compose([v1.Lambda(lambda image: image.crop((0, 0, 8, 8))), v1.ToTensor()])
CENTER = v1.Compose([v1.CenterCrop((10, 12)), v1.ToTensor()])
SMALL = v1.Compose([v1.Resize((12, 14)), v1.ToTensor()])
KINDS: list[dict[str, Any]] = [
    {"format": "JPEG", "quality": 90},
    {"format": "JPEG", "progressive": True, "subsampling": 0},
    {"format": "JPEG", "optimize": True, "restart_marker_blocks": 5},
    {"format": "JPEG", "icc_profile": bytes(range(250))},
    {"format": "PNG"},
]


def picture(generator: np.random.Generator, height: int, width: int) -> Image.Image:
    small = generator.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def damaged(data: bytes, generator: np.random.Generator) -> bytes:
    """Changed, left out, put in or cut off, mostly with the end marker in its place."""
    count, end = int(generator.integers(1, 60)), len(data) - 2
    at = int(generator.integers(2, end))
    before, behind = data[:at], data[min(at + count, end) :]
    kinds = [
        before + generator.bytes(len(data) - len(before) - len(behind)) + behind,
        before + bytes(len(data) - len(before) - len(behind)) + behind,
        before + behind,
        before + generator.bytes(count) + data[at:],
        before,
        before + data[end:],
        before + bytes([data[at] ^ 1 << count % 8]) + data[at + 1 :],
        before + bytes([0xFF, int(generator.integers(256))]) + data[at + 2 :],
    ]
    return kinds[int(generator.integers(len(kinds)))]


class Guarded(Dataset[Any]):
    """Catches what opening and converting raise, as data sets do, and tells what is raised where."""

    def __init__(self, files: list[bytes], transform: Any) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        place = "open"
        try:
            image = Image.open(io.BytesIO(self.files[index]))
            place = "convert"
            image = image.convert("RGB")
        except Exception as error:
            return place, type(error).__name__, str(error).split(" <_io")[0]
        try:
            return "whole", type(image).__name__, self.transform(image)
        except Exception as error:
            return "transform", type(error).__name__, str(error)


@pytest.mark.parametrize("transform", [UPPER_LEFT, CENTER, SMALL])
def test_damage_is_raised_where_pil_raises_it(transform: Any) -> None:
    generator = np.random.default_rng(len(transform.transforms[0].__dict__))
    files = []
    for number in range(300):
        height, width = generator.integers(16, 80, 2)
        file = io.BytesIO()
        picture(generator, height, width).save(file, **KINDS[number % len(KINDS)])
        files.append(damaged(file.getvalue(), generator))
    loader = DataLoader(Guarded(files, transform), batch_size=50, collate_fn=list)
    seen: Counter[str] = Counter()
    for found, expected in zip(fast(loader), loader, strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert mine[0] == other[0]
            seen[mine[1]] += 1
            if mine[0] == "whole":
                assert torch.equal(mine[2], other[2])
            else:
                assert mine == other
    assert seen["OSError"] > 50
    assert seen["LazyImage"] > 50, "damage that PIL passes over is passed over here, too"


def test_sound_files_are_read_by_us() -> None:
    generator = np.random.default_rng(0)
    files = []
    for kind in KINDS:
        for tail in (b"", b"\0" * 900):
            file = io.BytesIO()
            picture(generator, 40, 50).save(file, **kind)
            files.append(file.getvalue() + tail)
    loader = DataLoader(Guarded(files, SMALL), batch_size=99, collate_fn=list)
    assert {(place, kind) for place, kind, _ in next(iter(fast(loader)))} == {
        ("whole", "LazyImage")
    }


def test_further_images_of_a_file_and_what_pil_says_of_it(tmp_path: Path) -> None:
    first, second = (Image.new("RGB", (20, 16), color) for color in ("red", "blue"))
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    first.save(tmp_path / "0.mpo", save_all=True, append_images=[second])
    first.save(tmp_path / "1.jpg", exif=exif)
    first.save(tmp_path / "2.png")

    class Described(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            image = Image.open(io.BytesIO(sorted(tmp_path.iterdir())[index].read_bytes()))
            frames = getattr(image, "n_frames", None)
            words = [image.format, image.format_description, frames, image.get_format_mimetype()]  # type: ignore[attr-defined]
            if (frames or 1) > 1:
                image.seek(1)
            return [
                *words,
                image.tell(),
                image.convert("RGB").getpixel((3, 3)),
                image.convert("RGB").format,
            ]

    loader = DataLoader(Described(), batch_size=3, collate_fn=list)
    assert next(iter(fast(loader))) == next(iter(loader))
    assert next(iter(loader))[0][0] == "MPO"
