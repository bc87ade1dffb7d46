"""How images become the input of a model, as a user says it: a dict, or the transform of an evaluation."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights, ResNet50_Weights
from torchvision.transforms import v2

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.data.transforms.crops import eval_image
from flambeau.errors import InputError

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
NORMALIZE = v1.Normalize(MEAN, STD)

TRANSFORMS = {
    "v1": v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.ToTensor(), NORMALIZE]),
    "v1, no crop": v1.Compose([v1.Resize([32]), v1.CenterCrop((32, 32)), v1.ToTensor()]),
    "v1, squashed": v1.Compose([v1.Resize((32, 32)), v1.ToTensor(), NORMALIZE]),
    "v1, nested": v1.Compose([v1.Compose([v1.Resize(40)]), v1.CenterCrop(32), v1.ToTensor()]),
    "v1, bicubic": v1.Compose(
        [v1.Resize(40, v1.InterpolationMode.BICUBIC), v1.CenterCrop(32), v1.ToTensor(), NORMALIZE]
    ),
    "v1, grey": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.Grayscale(), v1.ToTensor()]),
    "v2": v2.Compose(
        [
            v2.RGB(), v2.Resize(40), v2.CenterCrop(32), v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor(),
        ]
    ),
    "torchvision": ResNet18_Weights.DEFAULT.transforms(crop_size=32, resize_size=37),
    "timm": timm.data.create_transform((3, 32, 32), mean=MEAN, std=STD, interpolation="bicubic"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_what_the_transform_does(name: str) -> None:
    """Compared with the transform itself, of images that are wide, high and square."""
    found = Preprocessing.of(TRANSFORMS[name])
    draw = np.random.default_rng(0)
    for height, width in ((50, 70), (90, 41), (45, 45), (33, 200)):
        coarse = draw.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        theirs = TRANSFORMS[name](image)
        channels = found.channels
        stored = np.asarray(image if channels == 3 else image.convert("L")).copy()
        pixels = eval_image(
            stored, found.image_size, resize=found.resize, interpolation=found.interpolation
        )
        x = torch.from_numpy(pixels.reshape(32, 32, channels)).permute(2, 0, 1).float() / 255
        ours = (x - torch.tensor(found.mean).view(-1, 1, 1)) / torch.tensor(found.std).view(
            -1, 1, 1
        )
        # PIL rounds in another order: by one level, rarely by two.
        assert (ours - theirs).abs().max() * min(found.std) < 2.5 / 255
        assert (ours - theirs).abs().mean() * min(found.std) < 0.5 / 255


def test_published_weights() -> None:
    found = Preprocessing.of(ResNet50_Weights.IMAGENET1K_V2.transforms())
    assert (found.image_size, found.resize, found.interpolation) == (224, 232, "bilinear")
    assert found.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_table_says_the_same(name: str) -> None:
    found = Preprocessing.of(TRANSFORMS[name])
    assert Preprocessing.of(found.as_table()) == found
    assert Preprocessing.of(found) is found


RANDOM = [v1.RandomResizedCrop(32), v1.ToTensor()]


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (v1.Compose(RANDOM), "RandomResizedCrop is none of"),
        (v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.Lambda(np.array)]), "Lambda is none of"),
        (v1.ToTensor(), "neither Resize nor CenterCrop"),
        (v1.Compose([v1.CenterCrop(32), v1.ToTensor()]), "images that are not resized"),
        (v1.Compose([v1.Resize(30), v1.CenterCrop(32), v1.ToTensor()]), "black borders"),
        (v1.Compose([v1.Resize((32, 40)), v1.ToTensor()]), "another shape than a square"),
        (v1.Compose([v1.Resize((40, 40)), v1.CenterCrop(32), v1.ToTensor()]), "another shape"),
        (v1.Compose([v1.Resize(40), v1.CenterCrop((32, 30)), v1.ToTensor()]), "is no square"),
        (v1.Compose([v1.Resize(40), v1.CenterCrop(32)]), "no floating-point numbers"),
        (v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.PILToTensor()]), "no floating-point"),
        (v1.Compose([v1.Resize(40), v1.ToTensor(), v1.CenterCrop(32)]), "CenterCrop is none of"),
        (v1.Compose([v1.Resize(40), v1.ToTensor(), NORMALIZE, NORMALIZE]), "normalizes twice"),
        (v1.Compose([v1.Resize(40, antialias=False), v1.ToTensor()]), "antialiased"),
        (v1.Compose([v1.Resize(40, max_size=50), v1.ToTensor()]), "max_size"),
        (v1.Compose([v1.Resize(40, v1.InterpolationMode.NEAREST), v1.ToTensor()]), "bilinear"),
        (v2.Compose([v2.Resize(40), v2.ToImage(), v2.ToDtype(torch.float32)]), "from 0 to 1"),
        (v1.Compose([v1.Resize(40), v1.Grayscale(), v1.ToTensor(), NORMALIZE]), "several channels"),
        (lambda image: image, "function is none of"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_told(transform: Any, why: str) -> None:
    with pytest.raises(
        InputError, match=f"^preprocess: this transform cannot be recorded: .*{why}"
    ):
        Preprocessing.of(transform)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image_size": 7}, "image_size must be a whole number from 8 to 16384, got 7"),
        ({"image_size": 32.0}, "image_size must be a whole number"),
        ({"image_size": True}, "image_size must be a whole number"),
        ({"mean": 0.5}, "mean must be a list of 1 to 1024 numbers"),
        ({"mean": []}, "mean must be a list of 1 to 1024 numbers"),
        ({"mean": ["a"] * 3}, "mean must be a list of 1 to 1024 numbers"),
        ({"std": [0.2]}, "mean has 3 numbers, and std has 1"),
        ({"std": [0.2, 0.2, 0]}, "std must be above 0"),
        ({"std": [0.2, 0.2, float("nan")]}, "std must be a list"),
        ({"interpolation": "nearest"}, "interpolation must be one of bilinear, bicubic"),
        ({"resize": 31}, "resize is the length of the shorter side .*, from image_size = 32 on"),
        ({"resize": (32, 32)}, 'or "squash" for both sides'),
        ({"pixels": "uint32"}, "pixels must be one of uint8, uint16, float32"),
        ({"size": 32}, "preprocess has no key 'size'"),
        ({"mean": None}, "mean must be a list"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(change: dict[str, Any], why: str) -> None:
    given = {"image_size": 32, "mean": MEAN, "std": STD}
    if change == {"mean": None}:
        del given["mean"]
        why = "preprocess says no mean"
        change = {}
    with pytest.raises(InputError, match=why):
        Preprocessing.of({**given, **change})
