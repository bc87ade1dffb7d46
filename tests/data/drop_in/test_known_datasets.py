"""Loaders and transforms of timm and of torchvision's scripts: known in full, or left as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.data.loader import PrefetchLoader
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from flambeau.data.drop_in.fast_loader import FastLoader
from flambeau.data.fast import fast
from flambeau.errors import InputError

# timm's reader of folders leaves closing its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
NUMBERS = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve smooth images in two classes."""
    draws = np.random.default_rng(0)
    for number in range(12):
        place = tmp_path / "ab"[number // 6] / f"{number:02}.jpg"
        place.parent.mkdir(exist_ok=True)
        noise = Image.fromarray(draws.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        noise.resize((70, 60 + number), Image.Resampling.BICUBIC).save(place, quality=92)
    return tmp_path


def timms(folder: Path, *, batch_size: int = 4, **settings: Any) -> Any:
    """What timm's training script makes its batches with."""
    dataset = create_dataset("", root=str(folder))
    return create_loader(
        dataset,
        (3, 32, 32),
        batch_size,
        device=torch.device("cpu"),
        **{"num_workers": 0} | settings,
    )


# ---------------------------------------------------------------- timm


def test_timms_loader_of_evaluation(folder: Path) -> None:
    loader = timms(folder)
    quick = fast(loader)
    assert isinstance(quick, PrefetchLoader), "what asks for its class, or its settings, finds them"
    assert isinstance(quick.loader, FastLoader)
    assert isinstance(loader.loader, DataLoader), "the user's own stays"
    assert quick.report() == (
        "to be taken over: reading, Resize, CenterCrop, MaybePILToTensor; read by threads"
    )
    one_level = 1 / 255 / 0.224
    for (images, labels), (expected, same) in zip(quick, loader, strict=True):
        assert (images.shape, images.dtype) == (expected.shape, expected.dtype)
        assert float((images - expected).abs().max()) < 1.01 * one_level
        assert torch.equal(labels, same)


def test_timms_loader_of_training(folder: Path) -> None:
    """The order is the sampler's, with levels that are erased and normalized by the PrefetchLoader."""
    labels = []
    for change in (lambda loader: loader, fast):
        loader = change(timms(folder, batch_size=5, is_training=True, re_prob=1.0, re_mode="const"))
        torch.manual_seed(3)
        batches = list(loader)
        assert len(batches) == len(loader) == 2, "the last two images are dropped"
        for images, _ in batches:
            assert images.shape == (5, 3, 32, 32)
            assert all(bool((image == 0).all(0).any()) for image in images), "erased"
        labels.append([target.tolist() for _, target in batches])
    assert labels[0] == labels[1]
    assert "RandomResizedCropAndInterpolation, RandomHorizontalFlip" in loader.report()
    assert loader.report().endswith("read by threads")


def test_mixup_of_timms_loader_is_switched_off(folder: Path) -> None:
    """As timm's script does behind --mixup-off-epoch."""
    mixup = FastCollateMixup(mixup_alpha=1.0, num_classes=2)
    quick = fast(timms(folder, is_training=True, collate_fn=mixup))
    _, target = next(iter(quick))
    assert target.shape == (4, 2)
    quick.mixup_enabled = False
    assert not mixup.mixup_enabled


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_timms_data_set_skips_a_file_that_was_cut_off(folder: Path, ending: str) -> None:
    path = folder / "a" / "02.jpg"
    broken = path.with_suffix(f".{ending}")
    with Image.open(path) as image:
        whole = image.copy()
    path.unlink()
    whole.save(broken)
    data = broken.read_bytes()
    broken.write_bytes(data[: len(data) * 2 // 3])
    loader = timms(folder, batch_size=12)
    [(images, labels)] = fast(loader)
    [(expected, _)] = loader
    assert labels.tolist() == [0] * 6 + [1] * 6
    assert torch.equal(images[2], images[3])
    assert torch.equal(images, expected)


def test_bytes_and_targets_changed_by_somebody_are_no_longer_known(folder: Path) -> None:
    loader = timms(folder)
    loader.dataset.target_transform = lambda label: label
    assert "the code of ImageDataset runs as it is" in fast(loader).report()
    loader.dataset.target_transform, loader.dataset.load_bytes = None, True
    assert "the code of ImageDataset runs as it is" in fast(loader).report()


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"channels_last": True}])
def test_timms_loader_places_batches_itself(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"PrefetchLoader places batches itself.*device="):
        fast(timms(folder), **settings)
    with pytest.raises(InputError, match="has been called on this loader already"):
        fast(fast(timms(folder)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_that_iterates_in_its_own_way(folder: Path) -> None:
    """The batch sampler of timm's MultiEpochsDataLoader has no end."""
    quick = fast(timms(folder, use_multi_epochs_loader=True, num_workers=1))
    assert (
        quick.report() == "nothing is taken over: MultiEpochsDataLoader has an __iter__ of its own"
    )
    for _ in range(2):
        assert [len(images) for images, _ in quick] == [4, 4, 4]


# ---------------------------------------------------------------- objects around a Compose


class Preset:
    """Like those of torchvision's scripts."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = v1.Compose(transforms)

    def __call__(self, img: Any) -> Any:
        """The words of a docstring are no code."""
        return self.transforms(img)


class TwoViews:
    """With code of its own."""

    def __init__(self, *transforms: Any) -> None:
        self.view = v1.Compose(transforms)

    def __call__(self, image: Any) -> Any:
        return self.view(image), self.view(image)


class Calls:
    """Passes on to something that is no Compose."""

    def __init__(self) -> None:
        self.inner = v1.ToTensor()
        self.unused = v1.Compose([v1.Resize(40), *NUMBERS])

    def __call__(self, image: Any) -> Any:
        return self.inner(image)


def test_a_preset_that_only_passes_on_is_known(folder: Path) -> None:
    loader = DataLoader(ImageFolder(folder, Preset(v1.Resize((40, 40)), *NUMBERS)), batch_size=12)
    quick = fast(loader)
    assert quick.report() == (
        "to be taken over: reading, Resize, PILToTensor, ConvertImageDtype; read by threads"
    )
    [(images, _)], [(expected, _)] = quick, loader
    assert float((images - expected).abs().max()) < 1.01 / 255


def test_other_objects_around_a_compose_are_code_of_ones_own(folder: Path) -> None:
    two = DataLoader(ImageFolder(folder, TwoViews(v1.RandomCrop(32), *NUMBERS)), batch_size=4)
    assert fast(two).report() == (
        "to be taken over: reading, RandomCrop, PILToTensor, ConvertImageDtype; as they are: TwoViews; "
        "read by the training process"
    )
    (one, other), _ = next(iter(fast(two)))
    assert not torch.equal(one, other)
    assert "as they are: Calls" in fast(DataLoader(ImageFolder(folder, Calls()))).report()
