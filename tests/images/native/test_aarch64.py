"""The C kernel compiled for aarch64 and run under qemu: the same pixels as on this machine."""

import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from flambeau.images.native.kernel import LIBRARY

CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")

pytestmark = pytest.mark.slow


def needs(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on this machine")


def built(compiler: str, options: tuple[str, ...], target: Path) -> Path:
    """The kernel and kernel_main.c as one program."""
    sources = [*LIBRARY.parent.glob("*.c"), Path(__file__).with_name("kernel_main.c")]
    flags = [*options, "-static", "-Wall", "-Werror", "-o", str(target)]
    subprocess.run([compiler, *flags, *map(str, sources)], check=True)
    return target


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth colors and noise."""
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([128 + 100 * np.sin(x / 23 + k) * np.cos(y / (17 + k)) for k in range(3)], -1)
    noise = np.random.default_rng(seed).normal(0, 60, smooth.shape) * (x > width // 2)[:, :, None]
    return (smooth + noise).clip(0, 255).astype(np.uint8)


def write_images(folder: Path) -> list[str]:
    """Path, height and width of each."""
    arguments = []
    for seed, sampling in enumerate((*SAMPLINGS, *SAMPLINGS, "restarts", "progressive")):
        height, width = ((131, 203), (33, 70), (9, 250), (77, 8), (64, 96))[seed % 5]
        image, quality = picture(height, width, seed), (30, 85, 100)[seed % 3]
        file = io.BytesIO()
        if sampling in SAMPLINGS:
            grey = sampling == "Gray"
            pixels = np.ascontiguousarray(image[:, :, :1]) if grey else image
            space = "GRAY" if grey else "RGB"
            file.write(simplejpeg.encode_jpeg(pixels, quality, space, sampling))
        elif sampling == "restarts":
            Image.fromarray(image).save(file, "JPEG", quality=quality, restart_marker_blocks=3)
        else:
            Image.fromarray(image).save(file, "JPEG", quality=quality, progressive=True)
        path = folder / f"{seed}.jpg"
        path.write_bytes(file.getvalue())
        arguments += [str(path), str(height), str(width)]
    # Quantizers of 255, where every product wraps and saturates.
    data = bytearray(Path(arguments[0]).read_bytes())
    tables = data.index(b"\xff\xdb")
    data[tables + 5 : tables + 69] = b"\xff" * 64
    (folder / "wild.jpg").write_bytes(data)
    return [*arguments, str(folder / "wild.jpg"), *arguments[1:3]]


def test_pixels_are_those_of_this_machine(hook: Any, tmp_path: Path) -> None:
    needs("gcc", CROSS, QEMU)
    here = built("gcc", hook.OPTIONS, tmp_path / "here")
    there = built(CROSS, hook.OPTIONS, tmp_path / "there")
    arguments = write_images(tmp_path)
    ours, theirs = (
        subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout
        for command in ([str(here)], [QEMU, str(there)])
    )
    assert theirs.splitlines() == ours.splitlines()
    lines = [line.split() for line in ours.splitlines()]
    done = [line for line in lines if line[1] == "0"]
    assert len(done) > 0.8 * len(lines) > 4000
    assert len({line[3] for line in done}) > 2000  # not all the same


def test_the_build_hook_takes_a_cross_compiler(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(CROSS)
    target = tmp_path / hook.FOLDER
    shutil.copytree(LIBRARY.parent, target, ignore=shutil.ignore_patterns("_*", "*.py"))
    monkeypatch.setenv("CC", CROSS)
    assert hook.build(tmp_path) == ""
    assert hook.platform_tag() == "linux_aarch64"
    header = (tmp_path / hook.LIBRARY).read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183  # EM_AARCH64
