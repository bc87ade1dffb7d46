"""The C kernel: scalar and AVX2 alike, no write out of bounds on damaged files, and how it is built."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image

from flambeau.images.jpeg import soundness
from flambeau.images.native import kernel as native
from flambeau.images.native.kernel import LIBRARY, Kernel, KernelError, kernel_status


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    found = native.kernel()
    if found is None:
        pytest.skip(kernel_status())
    return found


def files(kernel: Kernel, *, cut: bool = True) -> list[bytes]:
    rng = np.random.default_rng(0)
    found = []
    for k, sampling in enumerate(["444", "422", "420", "440", "411"]):
        shape = (int(rng.integers(20, 70)), int(rng.integers(40, 150)), 3)
        noise = rng.integers(0, 256, shape, dtype=np.uint8)
        flat = np.full(shape, 40 * k, np.uint8)
        for image, quality in ((noise, 100), (noise // 32 * 32, 30), (flat, 90)):
            data = simplejpeg.encode_jpeg(image, quality, "RGB", sampling)
            found.append(kernel.segment(bytes(data), 8 << k) if cut else bytes(data))
    return found


def decoded(kernel: Kernel, data: bytes, shape: tuple[int, ...], **settings: Any) -> Any:
    out = np.zeros(shape, np.uint8)
    kernel.decode_region(data, (0, 0, *shape[:2]), out, **settings)  # type: ignore[arg-type]
    return out


def pixels_or_code(kernel: Kernel, data: bytes, shape: tuple[int, ...], **settings: Any) -> Any:
    try:
        return decoded(kernel, data, shape, **settings)
    except KernelError as error:
        return error.code


def test_scalar_and_avx2_are_alike(kernel: Kernel) -> None:
    """Also in what they refuse: with quantisers of 255, values overflow."""
    if not kernel.uses_avx2:
        pytest.skip("this CPU has no AVX2")
    refused = False
    for data in files(kernel):
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        tables = data.index(b"\xff\xdb")
        wild = data[: tables + 5] + b"\xff" * 64 + data[tables + 69 :]
        for version in (data, wild):
            for eighths in (8, 4, 2, 1):
                shape = (-(-height * eighths // 8), -(-width * eighths // 8), 3)
                ours = pixels_or_code(kernel, version, shape, scale_eighths=eighths)
                scalar = pixels_or_code(kernel, version, shape, scale_eighths=eighths, scalar=True)
                np.testing.assert_array_equal(ours, scalar)
                refused |= isinstance(ours, int)
    assert refused


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, half of the time in the headers; sometimes cut short."""
    changed = bytearray(data)
    limit = len(data) if rng.random() < 0.5 else data.index(b"\xff\xda") + 14
    for at in rng.integers(0, limit, int(rng.integers(1, 6))):
        changed[at] = (
            int(rng.integers(256))
            if rng.random() < 0.7
            else changed[at] ^ 1 << int(rng.integers(8))
        )
    return bytes(changed[: int(rng.integers(limit)) if rng.random() < 0.1 else None])


def test_damaged_files_give_codes_and_no_write_out_of_bounds(kernel: Kernel) -> None:
    rng = np.random.default_rng(1)
    originals = files(kernel) + files(kernel, cut=False)
    guard, size = 4096, 20 * 30 * 3
    codes = set()
    for k in range(6000):
        data = mutated(originals[k % len(originals)], rng)
        memory = np.full(2 * guard + size, 77, np.uint8)
        out = memory[guard:-guard].reshape(20, 30, 3)
        box = (int(rng.integers(-1, 40)), int(rng.integers(-1, 60)), 20, 30)
        try:
            if k % 3:
                kernel.decode_region(data, box, out, scale_eighths=int(rng.choice([8, 8, 4, 2, 1])))
            else:
                box = (*box[:2], int(rng.integers(1, 50)), int(rng.integers(1, 50)))
                kernel.decode_region(data, box, out, scale_eighths=8, resize=True, mirror=k % 2 > 0)
            codes.add(0)
        except KernelError as error:
            codes.add(error.code)
        assert (memory[:guard] == 77).all() and (memory[-guard:] == 77).all()
        if k % 4 == 0:
            try:
                again = kernel.segment(data, 64)
            except KernelError as error:
                codes.add(error.code)
            else:  # what it takes, it writes so that libjpeg-turbo takes it
                Image.open(io.BytesIO(again)).load()
    assert codes == {0, *range(-4, 0)}  # of all kinds


def by_torch(pixels: Any, height: int, width: int, *, cubic: bool = False) -> Any:
    x_NCHW = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    mode = "bicubic" if cubic else "bilinear"
    resized = F.interpolate(x_NCHW, (height, width), mode=mode, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def test_markers_are_found_as_without_the_kernel(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    values = np.array([0xFF, 0xFF, 0x00, 0xD0, 0xD7, 0xD8, 0xD9, 0x12], np.uint8)
    some = [rng.choice(values, int(size)).tobytes() for size in rng.integers(0, 40, 200)]
    found = [list(soundness._markers(data, at)) for data in some for at in (0, 1, 7)]
    monkeypatch.setattr(soundness.native, "kernel", lambda: None)
    assert found == [list(soundness._markers(data, at)) for data in some for at in (0, 1, 7)]
    assert sum(map(len, found)) > 1000


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_resizing_is_torchs(kernel: Kernel, scalar: bool, cubic: bool) -> None:
    """From and to 1 pixel, much smaller and much larger; noise, and black and white."""
    rng = np.random.default_rng(0)
    for k in range(150):
        h, w, height, width = (int(2 ** rng.uniform(0, most)) for most in (9, 9, 7.9, 7.9))
        pixels = rng.integers(0, 256, (h, w + 3, 1 if k % 5 == 0 else 3), dtype=np.uint8)
        if k % 3 == 0:
            pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
        pixels = pixels[:, 1 : 1 + w]  # rows that are apart
        memory = np.full(height * width * pixels.shape[2] + 64, 77, np.uint8)
        out = memory[32:-32].reshape(height, width, pixels.shape[2])
        kernel.resize(pixels, out, mirror=k % 2 > 0, cubic=cubic, scalar=scalar)
        expected = by_torch(pixels, height, width, cubic=cubic)[:, :: -1 if k % 2 else 1]
        np.testing.assert_array_equal(out, expected, f"{pixels.shape} to {out.shape}")
        assert (memory[:32] == 77).all() and (memory[-32:] == 77).all()


@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_resizing_is_pillows(kernel: Kernel, scalar: bool, cubic: bool) -> None:
    """Where Pillow begins with the rows: the height shrinks by no more than twice what the width does."""
    rng, compared = np.random.default_rng(1), 0
    for k in range(300):
        h, w, height, width = (int(2 ** rng.uniform(0, 8.5)) for _ in range(4))
        if h - height > max(0, 2 * (w - width)):
            continue
        pixels = rng.integers(0, 256, (h, w, 1 if k % 5 == 0 else 3), dtype=np.uint8)
        if k % 3 == 0:
            pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        filter_ = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        expected = np.asarray(image.resize((width, height), filter_)).reshape(height, width, -1)
        memory = np.full(expected.size + 64, 77, np.uint8)
        out = memory[32:-32].reshape(expected.shape)
        kernel.resize(pixels, out, mirror=False, cubic=cubic, like_pillow=True, scalar=scalar)
        np.testing.assert_array_equal(out, expected, f"{pixels.shape} to {out.shape}")
        assert (memory[:32] == 77).all() and (memory[-32:] == 77).all()
        compared += 1
    assert compared > 100


def test_a_region_is_resized_as_its_pixels_are(kernel: Kernel) -> None:
    for k, data in enumerate(files(kernel) + files(kernel, cut=False)):
        region, out = np.empty((19, 23, 3), np.uint8), np.empty((7, 30, 3), np.uint8)
        kernel.decode_region(data, (1, 2, 19, 23), region, scale_eighths=8)
        kernel.decode_region(
            data,
            (1, 2, 19, 23),
            out,
            scale_eighths=8,
            resize=True,
            mirror=k % 2 > 0,
            cubic=k % 5 > 2,
            scalar=k % 3 > 0,
        )
        np.testing.assert_array_equal(
            out, by_torch(region, 7, 30, cubic=k % 5 > 2)[:, :: -1 if k % 2 else 1]
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("planes", [False, True])
def test_levels_become_the_values_of_a_table(kernel: Kernel, planes: bool, stream: bool) -> None:
    rng = np.random.default_rng(2)
    for height, width, channels in ((1, 1, 3), (7, 5, 3), (6, 3, 1), (8, 16, 3), (9, 24, 3)):
        pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        table = rng.standard_normal((channels, 256)).astype(np.float32)
        memory = torch.full(
            (pixels.size + 16,), 77.0
        ).numpy()  # torch's begins at 64 bytes, `out` at 32
        out = memory[8:-8].reshape((channels, height, width) if planes else pixels.shape)
        kernel.to_floats(pixels, table, out, planes=planes, stream=stream)
        expected = np.stack([table[c][pixels[:, :, c]] for c in range(channels)], axis=2)
        np.testing.assert_array_equal(out.transpose(1, 2, 0) if planes else out, expected)
        assert (memory[:8] == 77).all() and (memory[-8:] == 77).all()


@pytest.mark.parametrize("scalar", [False, True])
def test_rows_and_columns_of_a_mask(kernel: Kernel, scalar: bool) -> None:
    """Near and far columns, forward and backward, up to the last byte; also of a part of a larger mask."""
    draw = np.random.default_rng(3)
    for _ in range(300):
        height, width, rows, columns = draw.integers(1, 90, 4)
        mask = draw.integers(0, 256, (height, width + draw.integers(3))).astype(np.uint8)
        mask = mask[:, :width]
        chosen = draw.integers(0, width, columns)
        if draw.integers(3):
            chosen = np.sort(chosen)[:: draw.choice([-1, 1])]
        at = np.sort(draw.integers(0, height, rows)).astype(np.int32)
        out = np.empty((rows, columns), np.uint8)
        kernel.nearest(mask, at, chosen.astype(np.int32, order="C"), out, scalar=scalar)
        np.testing.assert_array_equal(out, mask[at][:, chosen])


def test_numbers_are_exchanged_by_a_table(kernel: Kernel) -> None:
    """The mask itself is never written to, and given back where the table changes nothing in it."""
    draw = np.random.default_rng(4)
    kept = 0
    for _ in range(300):
        highest = int(draw.integers(1, 257))
        mask = draw.integers(0, highest, (int(draw.integers(1, 90)), 211)).astype(np.uint8)
        mask[draw.random(mask.shape) < 0.01 * draw.integers(2)] = 255
        same = int(draw.integers(0, 257))
        table = np.where(np.arange(256) < same, np.arange(256), draw.integers(0, 256, 256))
        table[255] = draw.choice([7, 255])
        before = mask.copy()
        found = kernel.renumbered(mask, table.astype(np.uint8))
        np.testing.assert_array_equal(found, table[before])
        np.testing.assert_array_equal(mask, before)
        assert (found is mask) == bool((table[before] == before).all())
        kept += found is mask
    assert 30 < kept < 270


def test_sizes_that_cannot_be_are_refused(kernel: Kernel) -> None:
    for shape in ((0, 3, 3), (3, 0, 3)):
        for before, after in ((shape, (2, 2, 3)), ((2, 2, 3), shape)):
            with pytest.raises(KernelError):
                kernel.resize(np.zeros(before, np.uint8), np.zeros(after, np.uint8), mirror=False)


def test_status_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_kernel.so")
    assert kernel_status().startswith("not built") and native.kernel() is None
    (tmp_path / "_kernel.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "Kernel", lambda: Kernel(tmp_path / "_kernel.so"))
    with pytest.raises(OSError):
        Kernel(tmp_path / "_kernel.so")


def test_another_library_is_not_used() -> None:
    import _ctypes  # any shared library that is surely here

    if getattr(_ctypes, "__file__", None) is None:
        pytest.skip("this Python is built in one piece")
    with pytest.raises(OSError, match="another library"):
        Kernel(Path(_ctypes.__file__))


def checkout(folder: Path) -> Path:
    target = folder / "src" / "flambeau" / "images" / "native"
    target.mkdir(parents=True)
    for source in LIBRARY.parent.glob("*.[ch]"):
        shutil.copy(source, target)
    return target


def test_build_without_a_compiler(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checkout(tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in hook.build(tmp_path)
    monkeypatch.setenv("CC", "/bin/false")
    assert "failed" in hook.build(tmp_path)
    assert not list(target.glob("*.so"))


def test_build(hook: Any, tmp_path: Path) -> None:
    if not hook.find_compiler():
        pytest.skip("no C compiler")
    target = checkout(tmp_path)
    assert hook.build(tmp_path) == ""
    assert [path.name for path in target.glob("_*")] == ["_kernel.so"]
    built = Kernel(target / "_kernel.so")
    image = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    cut = built.segment(bytes(simplejpeg.encode_jpeg(image)), 16)
    np.testing.assert_array_equal(
        decoded(built, cut, (40, 60, 3), scale_eighths=8), simplejpeg.decode_jpeg(cut)
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_is_tagged_for_the_target_of_its_compiler(
    hook: Any, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("compilers for Linux")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$1 $2" >{tmp_path}/asked\necho {machine}-linux-gnu\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"{compiler} --option")
    assert hook.find_compiler() == [str(compiler), "--option"]
    assert hook.platform_tag() == f"linux_{machine}"
    assert (tmp_path / "asked").read_text() == "--option -dumpmachine\n"
