"""`fast(loader, packed=FILE)`: the images of a folder out of what `flambeau pack` has made of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from flambeau.data.fast import fast
from flambeau.errors import InputError

EVALUATION = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()])


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(1)
    for number in range(9):
        path = tmp_path / "photos" / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(small).resize((60 + number, 50), Image.Resampling.BICUBIC).save(path)
    return tmp_path / "photos"


def images_of(loader: Any) -> torch.Tensor:
    return torch.cat([images for images, _ in loader])


@pytest.mark.parametrize(
    "words",
    [
        "packed.rec", "packed.rec --segments", "packed.tar", "packed.lmdb", "packed.rec --shuffle",
        "packed.rec --encode png", "packed.npy --encode raw --resize 60 --center-crop",
    ],
)  # fmt: skip
@pytest.mark.parametrize("workers", [None, 1])
def test_pixels_are_those_of_the_files(
    photos: Path, flambeau: Any, words: str, workers: int | None
) -> None:
    assert flambeau("pack photos", words).code == 0
    packed = words.split()[0]
    loader = DataLoader(ImageFolder("photos", EVALUATION), batch_size=4)
    quick = fast(loader, packed=packed, workers=workers)
    assert quick.report().endswith("out of the packed copy")
    if "resize" not in words:
        assert torch.equal(images_of(quick), images_of(fast(loader)))
    for path in photos.glob("*/*"):  # they are not even opened
        path.unlink()
    assert images_of(quick).shape == (9, 3, 32, 32)


def test_smaller_copies_are_used_as_they_are(photos: Path, flambeau: Any) -> None:
    assert flambeau("pack photos small.rec --resize 40 --encode png").code == 0
    loader = DataLoader(ImageFolder(photos, EVALUATION), batch_size=9)
    [(images, _)] = fast(loader, packed="small.rec")
    assert float((images - images_of(loader)).abs().max()) < 0.05


def test_folder_by_any_of_its_names(photos: Path, flambeau: Any) -> None:
    assert flambeau("pack photos packed.rec").code == 0
    Path("link").symlink_to(photos)
    for name in (photos, "./photos/", "link", "photos/a/..", Path("photos")):
        dataset = ImageFolder(name, EVALUATION)
        packed = fast(DataLoader(dataset), packed="packed.rec").options.packed
        assert packed is not None
        assert all(packed.find(path) for path, _ in dataset.samples)


def test_one_of_two_parts(photos: Path, flambeau: Any) -> None:
    Path("both/train").parent.mkdir()
    shutil.copytree(photos, "both/train")
    shutil.copytree(photos, "both/val")
    (Path("both/val/a/0.jpg")).write_bytes(Path("both/val/b/1.jpg").read_bytes())
    assert flambeau("pack both two.rec").code == 0
    for name in ("train", "val"):
        loader = DataLoader(ImageFolder(f"both/{name}", EVALUATION), batch_size=9)
        assert torch.equal(
            images_of(fast(loader, packed=f"two_{name}.rec")), images_of(fast(loader))
        )
    with pytest.raises(InputError, match=r"two\.rec does not exist"):
        fast(loader, packed="two.rec")


def test_refusals(photos: Path, flambeau: Any) -> None:
    assert flambeau("pack photos packed.rec").code == 0
    loader = DataLoader(ImageFolder("photos", EVALUATION))

    def told(path: str, loader: Any = loader) -> str:
        with pytest.raises(InputError) as caught:
            fast(loader, packed=path)
        return str(caught.value)

    assert "gone.rec does not exist; make it: flambeau pack FOLDER gone.rec" in told("gone.rec")
    assert "of one folder, its attribute root; found: none" in told(
        "packed.rec",
        DataLoader(torch.arange(3)),  # type: ignore[arg-type]
    )
    shutil.copy("packed.rec", "alone.rec")
    assert "no .pack.json beside alone.rec" in told("alone.rec")
    Path("other.pack.json").write_text("{")
    index = Path("packed.rec.pack.json")
    made = json.loads(index.read_text())
    (photos / "a" / "new.jpg").write_bytes((photos / "a" / "0.jpg").read_bytes())
    assert "was not packed from photos as it is now" in told("packed.rec")
    (photos / "a" / "new.jpg").unlink()
    config = {**made["config"], "format": "tar", "shuffle": True}
    index.write_text(json.dumps({**made, "config": config}))
    assert "does not say which image is which" in told("packed.rec")
