"""Settings that were left open: what becomes of them, and when a run refuses changed data."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import Source
from flambeau.errors import InputError
from flambeau.run.loop.model_builder import model_file_sha256
from flambeau.run.options.option import values_of
from flambeau.trainer.parts import auto_settings
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import (
    DataFacts,
    Prepared,
    check_unchanged,
    datasets,
)
from flambeau.trainer.parts.device import pick_device
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import canonical

CPU = {"device": "cpu"}


class Memory:
    """A source of one image, as often as is asked for."""

    classes = ("a", "b")
    fingerprint = "00"

    def __init__(self, height: int, width: int, *, count: int = 100, mode: str = "RGB") -> None:
        # A tile, as often as it fits: such a PNG is decoded several times as fast as noise.
        tile = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        noise = np.tile(tile, (height // 4 + 1, width // 4 + 1, 1))[:height, :width]
        buffer = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(buffer, "PNG")
        self._data = buffer.getvalue()
        self.labels = torch.arange(count) % 2
        self.names = list(map(str, range(count)))

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> bytes:
        return self._data


def chosen(source: Source, **settings: Any) -> Settings:
    return resolve(Settings(**{"data": "own", **CPU, **settings}), source, source)[0]


@pytest.mark.parametrize(
    ("height", "width", "image_size", "model"),
    [
        (28, 28, 28, "small_convnet"),
        (64, 64, 64, "small_convnet"),
        (4, 4, 8, "small_convnet"),
        (28, 30, 32, "small_convnet"),
        (65, 65, 64, "small_convnet"),
        (100, 150, 96, "resnet18"),
        (150, 100, 96, "resnet18"),
        (224, 300, 224, "resnet18"),
        (1000, 800, 224, "resnet18"),
    ],
)
def test_size_and_model_follow_the_images(
    height: int, width: int, image_size: int, model: str
) -> None:
    settings = chosen(Memory(height, width))
    assert (settings.image_size, settings.model) == (image_size, model)


def test_what_is_given_is_kept() -> None:
    given = {
        "image_size": 40, "model": "resnet10t", "batch_size": 3, "workers": 3, "duration": "7st",
        "lr": 0.123, "precision": "bf16",
    }  # fmt: skip
    settings = chosen(Memory(28, 28), **given)
    assert {name: getattr(settings, name) for name in given} == given


def test_nothing_is_left_open() -> None:
    settings, _ = resolve(Settings(), Memory(28, 28), Memory(28, 28))
    left_open = {f.name for f in dataclasses.fields(settings)} - values_of(settings).keys()
    # Without effect on this schedule and optimizer.
    of_others = {"patience", "plateau_factor", "gamma", "milestones", "betas"}
    of_others |= {"crop_scale", "class_weights"}  # these images are moved, and of even classes
    of_others |= {
        "target",
        "label_separator",
        "group",
        "split",
        "fold",
        "subset",
        "test",
    }  # of tables, of several runs
    of_others |= {"ignore_index"}  # of masks
    of_others |= {"cache", "cache_size"}  # of a store
    of_others |= {
        "extend",
        "preset",
        "parts",
        "portable_bits",
        "eval_size",
        "start_size",
        "stop_within",
        "shuffle_window",
        "mirror",
        "weights",
        "head_lr",
        "muon_others_lr",
        "teacher",
        "teacher_weight",
        "temperature",
    }
    assert left_open == {"data", "epochs"} | of_others  # the embedded data; said as duration
    assert "auto" not in values_of(settings).values()
    assert canonical(settings) == settings


@pytest.mark.parametrize(
    ("count", "side", "size"),
    [
        (6000, 28, 128), (1000, 28, 64), (1023, 28, 64), (1024, 28, 128), (100, 28, 8), (2, 28, 2),
        (6000, 100, 64), (512, 100, 64), (511, 100, 32), (16, 100, 2), (21, 100, 3),
    ],
)  # fmt: skip
def test_batch_size_gives_eight_steps_and_no_lone_image(count: int, side: int, size: int) -> None:
    assert chosen(Memory(side, side, count=count)).batch_size == size


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("count", [9, 17, 33, 65, 129, 257, 513, 4097])
def test_no_epoch_ends_with_a_lone_image(count: int, accumulate: int) -> None:
    settings = chosen(Memory(8, 8, count=count), accumulate=accumulate)
    assert settings.batch_size is not None
    assert count % (settings.batch_size * accumulate) != 1


def test_learning_rate_grows_with_the_batch() -> None:
    source = Memory(100, 100, count=1000)  # resnet18
    assert chosen(source, batch_size=256).lr == 0.4
    assert chosen(source, batch_size=64).lr == 0.1
    assert chosen(source, batch_size=64, accumulate=4).lr == 0.4
    assert chosen(source, batch_size=64, model="resnet18.a1_in1k").lr == 0.1
    usual = 0.1 * 64 / 256  # He et al., CVPR 2016, section 3.4
    for model in ("resnet50", "vit_tiny_patch16_224", "torchvision:resnet18", "own.py:resnet18"):
        assert chosen(source, batch_size=64, model=model).lr == usual
    assert chosen(source, batch_size=256, optimizer="adamw").lr == 0.001
    assert chosen(source, batch_size=256, optimizer="adam").lr == 0.001
    assert chosen(source, batch_size=256, pretrained=True).lr == 0.04
    assert chosen(Memory(100, 100, count=5000), batch_size=4096).lr == 0.8
    # No batch is larger than the data.
    assert chosen(source, batch_size=100_000).lr == chosen(source, batch_size=1000).lr
    small = Memory(28, 28, count=1000)
    larger, smaller = (chosen(small, batch_size=size).lr or 0.0 for size in (256, 64))
    assert larger == pytest.approx(4 * smaller)


def test_settings_of_an_optimizer_and_a_schedule() -> None:
    source = Memory(100, 100, count=1000)
    assert chosen(source).momentum == 0.9
    assert chosen(source, optimizer="muon").momentum == 0.95
    assert chosen(source, optimizer="muon", momentum=0.5).momentum == 0.5
    assert chosen(source, optimizer="nadam").momentum is None
    assert chosen(source, optimizer="nadam").betas == "0.9,0.999"
    assert chosen(source, schedule="exponential").gamma == 0.9
    assert chosen(source, batch_size=256, optimizer="muon").lr == 0.002
    assert chosen(Memory(28, 28, count=1000), batch_size=256, optimizer="muon").lr == 0.008
    plateau = chosen(source, schedule="plateau", patience=7)
    assert (plateau.patience, plateau.plateau_factor) == (7, 0.1)
    assert (chosen(source).patience, chosen(source).plateau_factor) == (None, None)


def test_the_embedded_data_are_learned_in_a_minute() -> None:
    images = Memory(28, 28, mode="L", count=6000)
    settings = chosen(images, data=None)
    assert (settings.model, settings.duration) == ("tiny_convnet", "4ep")
    assert (settings.batch_size, settings.lr, settings.padding) == (64, 0.4, 0)
    rates = [chosen(images, data=None, batch_size=size).lr for size in (32, 128, 256, 512, 4096)]
    assert rates == [0.2, 0.8, 0.8, 0.8, 0.8]
    own = {"model": "resnet10t", "duration": "2ep", "batch_size": 32, "padding": 2}
    given = chosen(images, data=None, **own)
    assert {name: getattr(given, name) for name in own} == own
    assert chosen(Memory(65, 65), data=None, pretrained=True).model == "resnet18"


def test_how_far_images_are_moved() -> None:
    assert chosen(Memory(28, 28)).padding == 3
    assert chosen(Memory(28, 28), padding=5).padding == 5
    assert chosen(Memory(100, 100)).padding is None
    with pytest.raises(InputError, match="padding has no effect on images that are not all of 96"):
        chosen(Memory(100, 100), padding=1)
    with pytest.raises(InputError, match="padding = 28 must be below the image size, 28"):
        chosen(Memory(28, 28), padding=28)


def test_durations() -> None:
    assert chosen(Memory(8, 8)).duration == "30ep"
    pretrained = chosen(Memory(100, 100), data="x", pretrained=True)
    assert (pretrained.duration, pretrained.model) == ("10ep", "resnet18")


def test_channels_and_normalization() -> None:
    for mode, model, channels in (
        ("L", "small_convnet", 1), ("RGB", "small_convnet", 3), ("L", "torchvision:resnet18", 3),
    ):  # fmt: skip
        source = Memory(16, 16, mode=mode)
        _, facts = resolve(Settings(model=model, **CPU), source, source)
        assert (facts.channels, len(facts.mean), len(facts.std)) == (channels, channels, channels)
        assert all(0.3 < mean < 0.7 for mean in facts.mean)
    source = Memory(100, 100)
    _, facts = resolve(Settings(pretrained=True, **CPU), source, source)
    assert facts.mean == [0.485, 0.456, 0.406]  # those the published weights were made with


def test_workers_and_precision_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "usable_cpus", lambda: 12)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(auto_settings, "pick_device", lambda name: gpu)
    for native, precision in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(auto_settings, "native_bf16", lambda device, n=native: n)
        settings, _ = resolve(Settings(), Memory(100, 100), Memory(100, 100))
        assert (settings.workers, settings.precision, settings.device) == (8, precision, "cuda")
    assert resolve(Settings(), Memory(28, 28), Memory(28, 28))[0].workers == 0
    gpu.type = "cpu"
    settings, _ = resolve(Settings(device="cpu"), Memory(100, 100), Memory(100, 100))
    assert (settings.workers, settings.precision) == (0, "fp32")


def test_pick_device() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("cudda", "tpu", "meta", "cpu:x"):
        with pytest.raises(
            InputError, match=rf"^device = '{name}' is not available here: there is cpu[^()]*$"
        ):
            pick_device(name)
    assert pick_device("auto").type in ("cpu", "cuda", "mps", "xpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_a_missing_gpu_is_named_in_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^device = 'cuda:1' is not available here: there is cpu[^\n]+$"
    ):
        pick_device("cuda:1")


def facts_of(images: Path, model: str = "small_convnet") -> tuple[DataFacts, Source, Source]:
    train, val = open_sources(images)
    return resolve(Settings(model=model, **CPU), train, val)[1], train, val


def test_facts_come_back_as_they_went(images: Path, tmp_path: Path) -> None:
    facts, train, val = facts_of(images)
    path = tmp_path / "dataset.json"
    path.write_bytes(facts.as_json())
    assert DataFacts.read(path) == facts
    assert facts.classes == ["a", "b"]
    assert (facts.train_samples, facts.val_samples) == (len(train), len(val)) == (16, 8)
    assert facts.model_file_sha256 is None


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"classes": []}', b"\xff"])
def test_other_files_are_no_facts(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "dataset.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"dataset\.json cannot be read: .*a run of flambeau train"
    ):
        DataFacts.read(path)


def check(facts: DataFacts, images: Path, model: str = "small_convnet") -> None:
    train, val = open_sources(images)
    settings, _ = resolve(Settings(data=str(images), **CPU), train, val)
    check_unchanged(facts, train, val, settings=dataclasses.replace(settings, model=model))


def test_changed_data_are_refused(images: Path) -> None:
    facts, _, _ = facts_of(images)
    check(facts, images)
    check(facts, images.rename(images.with_name("moved")))  # a move changes nothing
    images = images.with_name("moved")
    extra = images / "train" / "a" / "extra.png"
    extra.write_bytes((images / "train" / "a" / "00.png").read_bytes())
    with pytest.raises(InputError, match=r"training data have changed .* \(16 images then, 17 now"):
        check(facts, images)
    extra.unlink()
    check(facts, images)
    (images / "val" / "b" / "00.png").unlink()
    with pytest.raises(InputError, match=r"validation data have changed .* \(8 images then, 7 now"):
        check(facts, images)


def test_a_changed_model_file_is_refused(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("x = 1", encoding="utf-8")
    model = f"{file}:make"
    facts, _, _ = facts_of(images, model)
    check(facts, images, model)
    file.write_text("x = 2", encoding="utf-8")
    with pytest.raises(InputError, match=rf"^{file} has changed since the run was started"):
        check(facts, images, model)
    file.unlink()
    with pytest.raises(InputError, match=rf"^{file} "):
        check(facts, images, model)


def test_only_files_have_a_hash(tmp_path: Path) -> None:
    assert model_file_sha256("resnet18") is None
    assert model_file_sha256("torchvision:resnet18") is None
    assert model_file_sha256(f"{tmp_path}/gone.py:make") is None


def test_the_two_data_sets(images: Path) -> None:
    train, val = open_sources(images)
    settings, facts = resolve(Settings(flip=False, skip_bad_images=2, **CPU), train, val)
    train_data, val_data = datasets(Prepared(settings, facts, train, val))
    assert (train_data.train, train_data.crop.flip, val_data.train) == (True, False, False)
    for data in (train_data, val_data):
        assert (data.image_size, data.channels, data.skip_bad, data.small) == (8, 1, True, True)
    assert not datasets(
        Prepared(dataclasses.replace(settings, skip_bad_images=0), facts, train, val)
    )[0].skip_bad
