"""Photographs for a bench where there are none: made from a seed, in a folder with a sub-folder per class.

    python bench/made_photos.py FOLDER [--num N] [--classes N] [--seed N] [--compare FOLDER]

Each is a scene of textures with the 1/f spectrum of natural images, behind shapes with edges, some of them
flat, under the noise of a sensor. Sizes are around 500 x 375, upright ones among them; JPEG quality is 75 to
95, more often high, and the chroma is 4:2:0 in four of five.

600 of them beside 294 photographs of ImageNet (mean; deciles 1, 5, 9), decoded by libjpeg-turbo on one core
of a busy Xeon: 109 kB (54, 99, 175) beside 112 kB (26, 113, 188), and 1.98 ms (1.09, 1.85, 3.13) beside
2.00 ms (0.64, 2.00, 3.08). --compare prints the same of a folder.
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Field = npt.NDArray[np.float32]
SIDES = ((500, 375), (500, 375), (500, 333), (500, 334), (500, 400), (640, 480), (400, 300))
UPRIGHT = 0.2  # as many of the 300 that the figures are compared with
QUALITIES = 75, 95


def texture(draw: np.random.Generator, height: int, width: int, steepness: float) -> Field:
    """Noise of mean 0 and standard deviation 1 whose amplitude falls as frequency to the power -steepness."""
    rows = np.fft.fftfreq(height).astype(np.float32)[:, None]
    columns = np.fft.rfftfreq(width).astype(np.float32)
    frequency = np.sqrt(rows**2 + columns**2)
    frequency[0, 0] = np.inf
    noise = draw.standard_normal((*frequency.shape, 2), dtype=np.float32).view(np.complex64)[..., 0]
    field = np.fft.irfft2(noise * frequency**-steepness, s=(height, width)).astype(np.float32)
    return field / field.std()


def outline(draw: np.random.Generator, height: int, width: int) -> npt.NDArray[np.bool_]:
    """The inside of an ellipse or a polygon."""
    mask = Image.new("1", (width, height))
    pen = ImageDraw.Draw(mask)
    center = draw.uniform(0, 1, 2) * (width, height)
    radius = draw.uniform(0.05, 0.35, 2) * width
    if draw.random() < 0.4:
        pen.ellipse([*(center - radius), *(center + radius)], fill=1)
    else:
        angles = np.sort(draw.uniform(0, 2 * np.pi, draw.integers(3, 9)))
        corners = center + np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius
        pen.polygon([tuple(corner) for corner in corners.tolist()], fill=1)
    return np.asarray(mask)


def scene(draw: np.random.Generator, height: int, width: int) -> Image.Image:
    """A picture: a background, three to ten shapes before it, and noise."""
    steepness = draw.uniform(0.6, 1.6)
    light = texture(draw, height, width, steepness)
    tints = [texture(draw, height, width, steepness + 0.3) for _ in range(2)]
    contrast = draw.uniform(25, 60)
    bright = np.full((height, width), draw.uniform(80, 170), np.float32) + contrast * light
    colors = [draw.uniform(-25, 25) + draw.uniform(5, 18) * tint for tint in tints]
    for _ in range(draw.integers(3, 11)):
        inside = outline(draw, height, width)
        level = draw.uniform(20, 235)
        if draw.random() < 0.4:  # flat, but for a slope
            slope = np.linspace(0, draw.uniform(-40, 40), width, dtype=np.float32)
            bright[inside] = np.broadcast_to(level + slope, bright.shape)[inside]
        else:
            shift = tuple(draw.integers(0, (height, width)).tolist())
            bright[inside] = level + draw.uniform(5, 60) * np.roll(light, shift, (0, 1))[inside]
        for color in colors:
            color[inside] = draw.uniform(-50, 50) + 0.3 * color[inside]
    bright += 26 * draw.random() ** 1.2 * draw.standard_normal(bright.shape, dtype=np.float32)
    planes = [bright, colors[0] + 128, colors[1] + 128]
    pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    return Image.frombytes("YCbCr", (width, height), pixels.tobytes()).convert("RGB")


def photo(seed: int, number: int) -> bytes:
    """One JPEG; the same for the same arguments."""
    draw = np.random.default_rng([seed, number])
    width, height = SIDES[draw.integers(len(SIDES))]
    scale = float(np.exp(draw.normal(0, 0.08)))
    width, height = round(width * scale), round(height * scale)
    if draw.random() < UPRIGHT:
        width, height = height, width
    subsampling = "4:2:0" if draw.random() < 0.8 else "4:4:4"
    quality = round(draw.triangular(QUALITIES[0], QUALITIES[1], QUALITIES[1]))
    file = io.BytesIO()
    scene(draw, height, width).save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def write(task: tuple[Path, int, int]) -> None:
    path, seed, number = task
    path.write_bytes(photo(seed, number))


def make(folder: Path, *, num: int, classes: int, seed: int) -> None:
    """Write them to folder/c000/p00000.jpg and so on, with a process per core."""
    names = [f"c{label:0{len(str(classes - 1))}d}" for label in range(classes)]
    for name in names:
        (folder / name).mkdir(parents=True)
    tasks = [(folder / names[k % classes] / f"p{k:05d}.jpg", seed, k) for k in range(num)]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.imap_unordered(write, tasks, chunksize=4):
            pass


def figures(paths: Iterable[Path]) -> dict[str, object]:
    """Kilobytes of files and milliseconds that libjpeg-turbo takes to decode them: mean and deciles."""
    import simplejpeg

    sizes = []
    times = []
    for path in paths:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            if image.mode != "RGB" or image.format != "JPEG":
                continue
        simplejpeg.decode_jpeg(data)
        start = time.process_time()
        simplejpeg.decode_jpeg(data)
        times.append((time.process_time() - start) * 1e3)
        sizes.append(len(data) / 1000)
    found: dict[str, object] = {"images": len(sizes)}
    for name, values in (("kB", sizes), ("decode_ms", times)):
        deciles = statistics.quantiles(values, n=10)
        found[name] = {
            "mean": round(statistics.mean(values), 2),
            "p10": round(deciles[0], 2),
            "median": round(deciles[4], 2),
            "p90": round(deciles[8], 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=Path, help="a folder of other photographs")
    told = parser.parse_args()
    start = time.perf_counter()
    make(told.folder, num=told.num, classes=told.classes, seed=told.seed)
    print(f"{told.num} photographs in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    for folder in filter(None, [told.compare and told.folder, told.compare]):
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        print(json.dumps({"folder": folder.name, **figures(paths)}))


if __name__ == "__main__":
    main()
