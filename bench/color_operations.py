"""Augmented images per second: our color operations against torchvision's on PIL images.

    taskset -c 1 python bench/color_operations.py --data DIR [--rounds N] [--record]

Up to 300 JPEGs found in DIR, held in memory. An augmented image is what a training sample costs on one
thread: decoded and cropped to 224 x 224 (flambeau.data.transforms.crops), the operations that the policy
draws for its seed, and an array of its pixels. Contenders differ in the operations alone: those of
flambeau.data.transforms.color, or torchvision.transforms.v2.functional on PIL images, with the conversion
there and back; names, magnitudes and order are the same. `none` is the image without any. Each round runs
every contender once over all images, in a new order, with new seeds; CPU time. `ratio` is the time of
torchvision's to ours in the same round: 1.05 is 5 % more per augmented image. One JSON line per contender.
"""

import argparse
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
import torchvision
from PIL import Image
from torchvision.transforms.v2 import functional

from flambeau.data.transforms.auto_augment import (
    Augmentation,
    Operation,
    draw_rand_augment,
    draw_trivial_augment_wide,
)
from flambeau.data.transforms.color import uniform
from flambeau.data.transforms.crops import train_image
from flambeau.images.native.kernel import kernel_status
from flambeau.images.pixels import Pixels
from provenance import commit, cpu_model, record  # beside this script

MOST_IMAGES, SIZE, JITTER = 300, 224, 0.4
Apply = Callable[[Pixels, int], Pixels]


def affine(
    image: Image.Image, *, shift: tuple[float, float], shear: tuple[float, float]
) -> Image.Image:
    degrees = [math.degrees(math.atan(amount)) for amount in shear]
    return functional.affine(
        image, angle=0.0, translate=[int(shift[0]), int(shift[1])], scale=1.0, shear=degrees, center=[0, 0]
    )  # fmt: skip


TORCHVISION: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Identity": lambda image, _: image,
    "ShearX": lambda image, amount: affine(image, shift=(0, 0), shear=(amount, 0)),
    "ShearY": lambda image, amount: affine(image, shift=(0, 0), shear=(0, amount)),
    "TranslateX": lambda image, right: affine(image, shift=(right, 0), shear=(0, 0)),
    "TranslateY": lambda image, down: affine(image, shift=(0, down), shear=(0, 0)),
    "Rotate": functional.rotate,
    "Brightness": lambda image, change: functional.adjust_brightness(image, 1.0 + change),
    "Color": lambda image, change: functional.adjust_saturation(image, 1.0 + change),
    "Contrast": lambda image, change: functional.adjust_contrast(image, 1.0 + change),
    "Sharpness": lambda image, change: functional.adjust_sharpness(image, 1.0 + change),
    "Posterize": lambda image, bits: functional.posterize(image, int(bits)),
    "Solarize": lambda image, share: functional.solarize(image, 255.0 * share),
    "AutoContrast": lambda image, _: functional.autocontrast(image),
    "Equalize": lambda image, _: functional.equalize(image),
}


def drawn(policy: str, seed: int) -> list[Operation]:
    if policy == "trivialaugment":
        return [draw_trivial_augment_wide(seed)]
    if policy == "randaugment":
        return draw_rand_augment(SIZE, SIZE, seed)
    # Color jitter: three changes of up to JITTER; their order does not matter for the time.
    names = ("Brightness", "Contrast", "Color")
    return [Operation(name, JITTER * (2 * uniform(seed, k) - 1)) for k, name in enumerate(names)]


def by_torchvision(policy: str) -> Apply:
    def apply(pixels: Pixels, seed: int) -> Pixels:
        image = Image.fromarray(pixels)
        for name, magnitude in drawn(policy, seed):
            image = TORCHVISION[name](image, magnitude)
        return np.array(image)

    return apply


def contenders() -> dict[str, Apply]:
    return {
        "none": lambda pixels, seed: pixels,
        "trivialaugment": Augmentation("trivialaugment"),
        "trivialaugment-torchvision": by_torchvision("trivialaugment"),
        "randaugment": Augmentation("randaugment"),
        "randaugment-torchvision": by_torchvision("randaugment"),
        "jitter": Augmentation(jitter=JITTER),
        "jitter-torchvision": by_torchvision("jitter"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/color_operations.jsonl"
    )
    arguments = parser.parse_args()
    paths = sorted(p for p in arguments.data.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    images = [path.read_bytes() for path in paths[:MOST_IMAGES]]
    if not images:
        sys.exit(f"{arguments.data}: no JPEG")
    made = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in made}
    shuffle = random.Random(0)
    for number in range(arguments.rounds + 1):  # the first one warms up
        for name in shuffle.sample(list(made), len(made)):
            start = time.process_time()
            for k, data in enumerate(images):
                seed = number * len(images) + k
                made[name](train_image(data, seed, SIZE, channels=3), seed)
            seconds[name].append(time.process_time() - start)
    results(arguments, len(images), {name: taken[1:] for name, taken in seconds.items()})


def results(arguments: argparse.Namespace, count: int, seconds: dict[str, list[float]]) -> None:
    common = {
        "images": count, "n": arguments.rounds, "torchvision": torchvision.__version__,
        "pillow": PIL.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "kernel": kernel_status(), "cpu": cpu_model(), "commit": commit(),
        "command": f"python bench/color_operations.py --rounds {arguments.rounds}",
    }  # fmt: skip
    for name, taken in seconds.items():
        ours = seconds[name.removesuffix("-torchvision")]
        ratios = [theirs / own for own, theirs in zip(ours, taken, strict=True)]
        line = {
            "contender": name,
            "ms_per_image": round(1000 * statistics.median(taken) / count, 3),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            **common,
        }
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
