"""`fast` takes over torchvision's v2 transforms of an image and its mask together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from flambeau import fast

NUM = 12
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]


class Pairs(Dataset[tuple[Any, Any]]):
    """White where the mask is 1, gray where it is 2, else black; 90 x 130 and smaller."""

    def __init__(self, folder: Path, transforms: Any, as_mask: Callable[[Any], Any]) -> None:
        self.folder, self.transforms, self.as_mask = folder, transforms, as_mask

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with Image.open(self.folder / f"{index}.png") as file:
            image = file.convert("RGB")
        with Image.open(self.folder / f"{index}.mask.png") as file:
            numbers = torch.from_numpy(np.array(file))
        image, mask = self.transforms(image, tv_tensors.Mask(self.as_mask(numbers)))
        return image, mask


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(NUM):
        mask = np.zeros((90 - 2 * k, 130 - k), np.uint8)
        mask[20:50, 30 + k : 90] = 1
        mask[55:70, 10:60] = 2
        gray = np.array([0, 255, 128], np.uint8)[mask]
        Image.fromarray(np.repeat(gray[:, :, None], 3, 2)).save(tmp_path / f"{k}.png")
        Image.fromarray(mask).save(tmp_path / f"{k}.mask.png")
    return tmp_path


def read(loader: Any) -> tuple[Tensor, Tensor]:
    batches = list(loader)
    images, masks = (torch.cat([pair[at] for pair in batches]) for at in (0, 1))
    return images, masks


@pytest.mark.parametrize("as_mask", [lambda m: m, lambda m: m[None], lambda m: m.long()])
@pytest.mark.parametrize(
    "transforms",
    [
        [v2.Resize((40, 50)), *FLOATS],
        [v2.Resize(48), v2.CenterCrop(40), *FLOATS],
        [v2.CenterCrop((100, 140)), v2.Resize((60, 60)), v2.ToImage()],
        [v2.ToImage(), v2.Resize((40, 50), antialias=True), v2.ToPureTensor()],
        [
            v2.Resize((40, 50)),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True),
        ],
    ],
)
def test_without_randomness_masks_are_torchvisions(
    folder: Path, transforms: list[Any], as_mask: Callable[[Tensor], Tensor]
) -> None:
    loader = DataLoader(Pairs(folder, v2.Compose(transforms), as_mask), batch_size=4)
    (images, masks), (ours, our_masks) = read(loader), read(faster := fast(loader))
    assert type(our_masks) is type(masks) and our_masks.dtype == masks.dtype
    assert torch.equal(our_masks, masks)
    assert ours.dtype == images.dtype and torch.equal(ours, images)
    assert "taken over in 12 samples" in faster.report()
    assert "Compose" not in faster.report()


@pytest.mark.parametrize(
    "transforms",
    [
        [v2.RandomResizedCrop(48, scale=(0.2, 1)), v2.RandomHorizontalFlip(), v2.ToImage()],
        [v2.ToImage(), v2.RandomResizedCrop((48, 40)), v2.RandomVerticalFlip(), v2.ToPureTensor()],
        [v2.Resize((70, 80)), v2.RandomCrop(48, padding=4), v2.RandomHorizontalFlip(), *FLOATS],
        [v2.RandomHorizontalFlip(), v2.RandomResizedCrop(48), v2.ColorJitter(0.1), v2.ToImage()],
    ],
)
def test_an_image_and_its_mask_are_changed_alike(folder: Path, transforms: list[Any]) -> None:
    loader = DataLoader(Pairs(folder, v2.Compose(transforms), lambda m: m), batch_size=6)
    faster = fast(loader)
    torch.manual_seed(3)
    for _ in range(5):
        images, masks = read(faster)
        levels = images.float()
        levels = (levels - levels.amin()) / (levels.amax() - levels.amin())
        # But for the pixels at edges, which the filter of images mixes.
        assert float(((levels[:, 0] > 0.8) == (masks == 1)).float().mean()) > 0.93
        assert bool((masks == 1).any()) and bool((masks == 2).any())
    again = read(faster)[1]
    assert not torch.equal(again, masks)  # drawn anew
    report = faster.report()
    names = [type(one).__name__ for one in transforms]
    assert all(name in report.partition(";")[0] for name in names), report


def test_the_mask_follows_the_seed_as_the_image_does(folder: Path) -> None:
    """The same seed gives the same pair, and half of the pairs are mirrored."""
    transforms = v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()])
    faster = fast(DataLoader(Pairs(folder, transforms, lambda m: m), batch_size=1))
    pairs = []
    for _ in range(2):
        torch.manual_seed(5)
        pairs.append([mask for _ in range(6) for _, mask in faster])
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
    mirrored = sum(bool(mask[0, 60, 11] != 2) for mask in pairs[0] if mask.shape[1] > 75)
    assert 8 < mirrored < 40


@pytest.mark.parametrize(
    "transforms",
    [
        [v2.RandomRotation(30), v2.Resize((40, 40)), v2.ToImage()],
        [
            v2.Resize((60, 60)),
            v2.RandomCrop(40, padding=2, fill={tv_tensors.Mask: 9, "others": 0}),
            v2.ToImage(),
        ],
        [v2.Resize((40, 40)), v2.ToImage(), v2.ToDtype(torch.float32), v2.RandomErasing(p=0.0)],
        [v2.RandomApply([v2.CenterCrop(30)], p=1.0), v2.Resize((40, 40)), v2.ToImage()],
    ],
)
def test_what_is_not_known_of_masks_runs_as_it_is(folder: Path, transforms: list[Any]) -> None:
    loader = DataLoader(Pairs(folder, v2.Compose(transforms), lambda m: m), batch_size=4)
    faster = fast(loader)
    torch.manual_seed(0)
    images, masks = read(faster)
    assert images.shape[-2:] == masks.shape[-2:] == (40, 40)
    assert "Compose" in faster.report()


def test_a_mask_of_another_size_fails_as_in_torchvision(folder: Path) -> None:
    transforms = v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()])
    loader = DataLoader(Pairs(folder, transforms, lambda m: m[:-1]), batch_size=4)
    messages = []
    for one in (loader, fast(loader)):
        with pytest.raises(ValueError, match="multiple HxW dimensions") as refused:
            next(iter(one))
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_a_mask_is_not_changed_in_place(folder: Path) -> None:
    kept = tv_tensors.Mask(torch.arange(90 * 130, dtype=torch.int32).reshape(90, 130))
    before = kept.clone()

    class One(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            with Image.open(folder / "0.png") as file:
                return v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToImage()])(
                    file.convert("RGB"), kept
                )

    _, masks = read(fast(DataLoader(One(), batch_size=2)))
    assert torch.equal(kept, before)
    assert torch.equal(masks[0], before.flip(-1).as_subclass(Tensor))
