"""What tests share: a process left as it was found, small images, and the command called in process."""

import os

# Before torch is imported: tests are small, and two threads that wait for each other on a busy machine make
# them ten times slower. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.deterministic
from PIL import Image

from flambeau.cli.command import main
from flambeau.recipes.setup.seeding import rng_state, set_rng_state

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets all of this for its whole process, which here is that of all tests."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    generators, threads = rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    modules = set(sys.modules)
    yield
    set_rng_state(generators)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - modules:
        if name.startswith("flambeau_model_"):
            del sys.modules[name]


class Answer(NamedTuple):
    """What a command gave: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def flambeau(capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command: `flambeau("train", folder, "--duration 4st")`; texts are split as a shell does."""

    def call(*words: str | os.PathLike[str]) -> Answer:
        arguments = [
            part
            for word in words
            for part in (shlex.split(word) if isinstance(word, str) else [str(word)])
        ]
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
        return Answer(code, *capsys.readouterr())

    return call


def write_images(
    root: Path, *, classes: str = "ab", per_class: int = 8, size: int = 8, seed: int = 0
) -> Path:
    """A folder of grey PNG files of noise, in each class of another brightness; all of the same length."""
    generator = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            low = 100 * label
            pixels = generator.integers(low, low + 120, (size, size), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:02}.png", compress_level=0)
    return root


@pytest.fixture
def make_images() -> Callable[..., Path]:
    """The function `write_images`."""
    return write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """train/ and val/ with classes a and b, of 8 and 4 images of 8 x 8 pixels each."""
    write_images(tmp_path / "images" / "train")
    write_images(tmp_path / "images" / "val", per_class=4, seed=1)
    return tmp_path / "images"


def write_photos(root: Path) -> Path:
    """A folder of 18 JPEG files of different sizes; one is CMYK, one grey, one turned by its EXIF tag."""
    y, x = np.mgrid[:120, :120]
    for label, name in enumerate(("ant", "bee", "cat")):
        (root / name).mkdir(parents=True)
        for index in range(6):
            planes = [x * (label + 1) + 20 * index, y * (3 - label) + 9 * index, x + y + 40 * label]
            height, width = 70 + 7 * index, 110 - 6 * index
            image = Image.fromarray(np.stack(planes, 2)[:height, :width].astype(np.uint8))
            if index < 2:
                image = image.convert(("CMYK", "L")[index])
            exif = Image.Exif()
            if index == 2:
                exif[0x0112] = 6
            image.save(root / name / f"{index}.jpg", exif=exif)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of JPEG photos, see `write_photos`."""
    return write_photos(tmp_path / "photos")
