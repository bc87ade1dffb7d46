"""Draw the pictures of the cookbook pages as SVG files, from what is computed or was measured.

    python tools/draw/cookbook.py

learning-curves and confusion show the lines of bench/results/learning_curves.jsonl; memory-of-a-step what
`estimate_memory` counts of a ResNet-18; mixup-and-cutmix what the recipes make of four embedded images;
receptive-field what `chain` says. tests/test_cookbook_pictures.py compares the files in
docs/pictures/cookbook with what this writes. The colors are legible on white and on black.
"""

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.models import resnet18

from flambeau.data.sources.open_data import open_sources
from flambeau.images.decode import decode
from flambeau.recipes.memory import memory_budget
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules
from flambeau.recipes.models.convolution_sizes import Window, chain
from flambeau.recipes.training.cutmix import cutmix
from flambeau.recipes.training.mixup import mixup
from flambeau.report.svg import element

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures" / "cookbook"
CURVES = ROOT / "bench" / "results" / "learning_curves.jsonl"
FIRST, SECOND, TEXT = "#d2691e", "#4a90d9", "#808080"
MOST_LOSS = 2.6  # at the top of the curves; chance is 2.3
STEP_BATCH = 32
PHASES = {
    "forward": {"start", "forward"},
    "backward": {"gradients", "backward"},
    "optimizer": {"end"},
}
BLOCKS = ("layer1", "layer2", "layer3", "layer4")


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A file."""
    return element(
        "svg",
        *(f"\n{part}" for part in [element("title", title), *parts]),
        "\n",
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        font_family="sans-serif",
        font_size=12,
        fill=TEXT,
    )


def words(x: int, y: int, text: str, **more: object) -> str:
    return element("text", text, x=x, y=y, **more)


def line(points: Sequence[tuple[int, int]], color: str) -> str:
    joined = " ".join(f"{x},{y}" for x, y in points)
    return element("polyline", points=joined, stroke=color, stroke_width=2, fill="none")


# ---------------------------------------------------------------- learning curves, confusion


def trainings() -> dict[str, dict[str, Any]]:
    """The newest line of each training."""
    rows = map(json.loads, CURVES.read_text(encoding="utf-8").splitlines())
    return {row["training"]: row for row in rows}


def curve(values: Sequence[float], left: int, top: int) -> list[tuple[int, int]]:
    """Points of a panel of 180 x 130 pixels."""
    wide = 180 / (len(values) - 1)
    return [
        (left + round(number * wide), top + 130 - round(130 * min(value, MOST_LOSS) / MOST_LOSS))
        for number, value in enumerate(values)
    ]


def learning_curves() -> str:
    parts = []
    for number, (name, row) in enumerate(trainings().items()):
        left = 34 + number * 218
        parts += [
            words(left, 14, name, font_weight="bold"),
            element("path", d=f"M{left},24V154H{left + 180}", stroke=TEXT, fill="none"),
            words(left - 6, 158, "0", text_anchor="end"),
            words(left - 6, 154 - round(130 * 2 / MOST_LOSS) + 4, "2", text_anchor="end"),
            words(left + 180, 170, f"epoch {len(row['val_loss'])}", text_anchor="end"),
            line(curve(row["train_loss"], left, 24), FIRST),
            line(curve(row["val_loss"], left, 24), SECOND),
        ]
    parts += [
        words(34, 190, "loss of the training", fill=FIRST),
        words(180, 190, "loss of the validation", fill=SECOND),
    ]
    return picture(660, 198, "Losses of three trainings: learns, overfits, rate too large", parts)


def confusion() -> str:
    row = trainings()["learns"]
    cell, left, top = 30, 90, 96
    parts = []
    for number, name in enumerate(row["classes"]):
        middle = number * cell + cell // 2
        x = left + middle + 4
        parts += [
            words(left - 6, top + middle + 4, name, text_anchor="end"),
            words(x, top - 6, name, transform=f"rotate(-60 {x} {top - 6})"),
        ]
    for truth, counts in enumerate(row["confusion"]):
        for guess, count in enumerate(counts):
            x = left + guess * cell
            y = top + truth * cell
            color = FIRST if truth == guess else SECOND
            share = f"{min(1.0, count / sum(counts) * (1 if truth == guess else 4)):.2f}"
            parts.append(
                element(
                    "rect",
                    x=x,
                    y=y,
                    width=cell - 1,
                    height=cell - 1,
                    fill=color,
                    fill_opacity=share,
                )
            )
            if count:
                shade = "#fff" if truth == guess else None
                parts.append(
                    words(x + cell // 2, y + 19, str(count), text_anchor="middle", fill=shade)
                )
    side = cell * len(row["classes"])
    parts.append(words(left, top + side + 18, "rows: what it is; columns: what the model says"))
    return picture(left + side + 40, top + side + 26, "Confusion matrix of 1,000 images", parts)


# ---------------------------------------------------------------- memory of a step


def step_bytes(recomputed: Sequence[str]) -> list[tuple[str, int]]:
    """What is done, and the bytes that are live then, from the start of a step to its end."""
    phases = memory_budget._simulate(
        resnet18(),
        (torch.empty(STEP_BATCH, 3, 224, 224, device="meta"),),
        partial(memory_budget._forward, memory_budget.mean_of_all, None),
        torch.optim.AdamW,
        checkpoint_modules,
        BLOCKS,
        recomputed,
    )
    found = []
    for phase in memory_budget._step(phases):
        kind = phase.label[0].split()[0]
        found += [(kind, size) for size in (phase.start, phase.peak, phase.end or phase.start)]
    return found


def memory_of_a_step() -> str:
    parts = [element("path", d="M60,20V190H560", stroke=TEXT, fill="none")]
    for recomputed, color, label in (
        ((), FIRST, "as it is"),
        (BLOCKS, SECOND, "the four stages computed twice"),
    ):
        sizes = [size for _, size in step_bytes(recomputed)]
        wide = 500 / (len(sizes) - 1)
        points = [
            (60 + round(number * wide), 190 - round(size / 2**30 * 160))
            for number, size in enumerate(sizes)
        ]
        parts.append(line(points, color))
        y = 226 if recomputed else 210
        parts.append(words(60, y, f"{label}: {max(sizes) / 2**20:.0f} MiB at the peak", fill=color))
    parts += [words(54, 34, "1 GiB", text_anchor="end"), words(54, 194, "0", text_anchor="end")]
    kinds = [kind for kind, _ in step_bytes(())]
    for name, of in PHASES.items():
        places = [place for place, kind in enumerate(kinds) if kind in of]
        middle = 60 + round(250 * (places[0] + places[-1]) / (len(kinds) - 1))
        parts.append(words(middle, 16, name, text_anchor="middle"))
    title = f"Memory over a training step of a ResNet-18, {STEP_BATCH} images of 224 pixels"
    return picture(600, 236, title, parts)


# ---------------------------------------------------------------- mixup, cutmix, receptive field


def bitmap(pixels: torch.Tensor) -> str:
    """An image of grey levels, (28, 28) uint8, as the address of a BMP file: its bytes are no encoder's."""
    palette = b"".join(bytes((level, level, level, 0)) for level in range(256))
    rows = bytes(pixels.flip(0).contiguous().flatten().tolist())
    side = pixels.shape[0]
    start = 14 + 40 + len(palette)
    head = b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start)
    head += struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 0, len(rows), 0, 0, 256, 0)
    return "data:image/bmp;base64," + base64.b64encode(head + palette + rows).decode()


def shares(soft: torch.Tensor, names: Sequence[str]) -> str:
    """The classes of a soft label."""
    return ", ".join(f"{p:.0%} {names[k]}" for k, p in enumerate(soft.tolist()) if p > 0.005)


def mixup_and_cutmix() -> str:
    source, _ = open_sources(None)
    labels = source.labels.tolist()
    chosen = [labels.index(1), labels.index(7)]
    pixels = [torch.from_numpy(decode(source.read(index), channels=1)) for index in chosen]
    images = torch.stack(pixels).permute(0, 3, 1, 2).float() / 255
    targets = torch.tensor([labels[index] for index in chosen])
    generator = torch.Generator().manual_seed(18)
    both: dict[str, Any] = {"num_classes": 10, "alpha": 1.0, "generator": generator}
    shown = [(name, images[k], source.classes[labels[i]]) for k, (name, i) in
             enumerate(zip(("an image", "another"), chosen, strict=True))]  # fmt: skip
    for name, recipe in (("mixup", mixup), ("cutmix", cutmix)):
        mixed, soft = recipe(images, targets, **both)
        shown.append((name, mixed[0], shares(soft[0], source.classes)))
    parts = []
    for number, (name, image, label) in enumerate(shown):
        x = number * 160
        levels = (image[0] * 255).round().to(torch.uint8)
        parts += [
            words(x, 14, name, font_weight="bold"),
            element(
                "image", x=x, y=22, width=140, height=140, href=bitmap(levels),
                style="image-rendering:pixelated",
            ),
            words(x, 178, label, font_size=11),
        ]  # fmt: skip
    return picture(640, 186, "Two images, and what mixup and cutmix make of them", parts)


def squares(windows: Sequence[Window], left: int, cell: int) -> Iterator[str]:
    """What one position sees after each window: squares around one pixel of a grid of 15 x 15."""
    middle = 7 * cell + cell // 2
    for k in range(16):
        at = k * cell
        yield element(
            "path", d=f"M{left},{24 + at}h{15 * cell}M{left + at},24v{15 * cell}", stroke=TEXT,
            stroke_opacity=0.3,
        )  # fmt: skip
    for number, stage in reversed(list(enumerate(chain(15, windows), 1))):
        side = round(stage.sees * cell)
        corner = middle - side // 2
        yield element(
            "rect", x=left + corner, y=24 + corner, width=side, height=side, fill=FIRST,
            fill_opacity=0.25, stroke=FIRST,
        )  # fmt: skip
        sees = f"{stage.sees:g}"
        yield words(left + 15 * cell + 8, 24 + corner + 12, f"layer {number}: {sees} x {sees}")


def receptive_field() -> str:
    cell = 12
    parts = []
    for left, stride in ((0, 1), (330, 2)):
        windows = [Window(3, stride=stride, padding=1)] * 3
        parts.append(
            words(left, 14, f"three convolutions of 3 x 3, stride {stride}", font_weight="bold")
        )
        parts += squares(windows, left, cell)
    return picture(640, 24 + 15 * cell + 6, "Pixels that one output depends on", parts)


def pictures() -> dict[str, str]:
    """The files by name."""
    return {
        "learning-curves": learning_curves(),
        "confusion": confusion(),
        "memory-of-a-step": memory_of_a_step(),
        "mixup-and-cutmix": mixup_and_cutmix(),
        "receptive-field": receptive_field(),
    }


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pictures().items():
        (FOLDER / f"{name}.svg").write_text(content + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
