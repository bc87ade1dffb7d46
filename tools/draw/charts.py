"""Draw the charts of docs/en/performance.md as SVG files, from the lines of bench/results.

    python tools/draw/charts.py

Run it after a bench; tests/test_charts.py compares the files in docs/pictures/charts with what this writes.
A chart shows the rows of one commit, so that all of them were measured in the same rounds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures" / "charts"
LABEL, BAR, NUMBER, ROW, HEAD = 190, 380, 80, 24, 44  # pixels: widths of the columns, heights
OURS, OTHERS, TEXT = "#d2691e", "#8899aa", "#808080"  # legible on white and on black


@dataclass(frozen=True)
class Chart:
    """Which rows of a file of bench/results are shown, and by which figure."""

    file: str
    commit: str
    value: str
    spread: tuple[str, str]  # names of the lower and the upper end
    title: str
    labels: dict[str, str]  # of the contenders, in their order from top to bottom
    ranks: int = 0  # rows of so many processes alone


CHARTS = {
    "trainer-overhead": Chart(
        "trainer_overhead",
        "b73046ec",
        "ratio",
        ("ratio_p25", "ratio_p75"),
        "Processor time of a step of a tiny network, against the bare loop",
        {
            "bare": "bare loop",
            "bare with fused SGD": "bare loop, fused SGD",
            "by hand with extras": "loop by hand, with extras",
            "flambeau Run": "flambeau Run",
            "flambeau Run with extras": "flambeau Run, with extras",
            "lightning Fabric": "Lightning Fabric",
            "ignite": "Ignite",
            "accelerate": "Accelerate",
            "lightning Trainer": "Lightning Trainer",
        },
    ),
    "image-loader": Chart(
        "image_loader",
        "b48cb6e",
        "ratio",
        ("ratio_min", "ratio_max"),
        "Images per second, from JPEG files to batches, against torchvision with PIL",
        {
            "torchvision-v1": "torchvision v1, PIL",
            "torchvision-v2": "torchvision v2, PIL",
            "torchvision-v2-tensor": "torchvision v2, tensors",
            "timm": "timm",
            "webdataset": "webdataset",
            "dali": "DALI on the CPU",
            "spdl": "SPDL",
            "grain": "Grain",
            "litdata": "LitData",
            "mosaicml-streaming": "MosaicML Streaming",
            "opencv": "OpenCV",
            "tf.data": "tf.data",
            "flambeau-simplejpeg": "flambeau, no C kernel",
            "flambeau": "flambeau",
            "flambeau-packed": "flambeau, packed JPEG",
        },
    ),
    "train-end-to-end": Chart(
        "train_end_to_end",
        "1c980bf4",
        "wall_ratio",
        ("wall_ratio_min", "wall_ratio_max"),
        "Time from the command to the weights on two cores, against torchvision's loop",
        {
            "torchvision, 128 px": "torchvision's loop",
            "timm, 128 px": "timm's script",
            "timm --train-img-sizes, 128 px": "timm, small images first",
            "lightning, 128 px": "Lightning",
            "flambeau train, 128 px": "flambeau train",
            "flambeau train --start-size, 128 px": "flambeau, small images first",
        },
    ),
    "processes": Chart(
        "scaling",
        "97e76d4",
        "ratio",
        ("ratio_p25", "ratio_p75"),
        "Time of a step on two processes, against torch's DDP",
        {
            "ddp": "loop by hand with DDP",
            "flambeau-none": "flambeau",
            "flambeau-bf16": "flambeau, gradients bf16",
            "flambeau-fp16": "flambeau, gradients fp16",
            "flambeau-powersgd": "flambeau, PowerSGD",
        },
        ranks=2,
    ),
}


def rows(chart: Chart) -> list[dict[str, Any]]:
    """The rows of a chart, from top to bottom."""
    text = (ROOT / "bench" / "results" / f"{chart.file}.jsonl").read_text(encoding="utf-8")
    found = {
        row["contender"]: row
        for row in map(json.loads, text.splitlines())
        if row["commit"] == chart.commit and row.get("ranks", 0) in (0, chart.ranks)
    }
    return [found[contender] for contender in chart.labels]


def svg(chart: Chart) -> str:
    """A bar per row with its spread as a line, on the scale of the largest."""
    shown = rows(chart)
    scale = BAR / max(row[chart.spread[1]] for row in shown)
    width = LABEL + BAR + NUMBER
    height = HEAD + ROW * len(shown) + 8
    first = shown[0]
    cpu = first["cpu"] if "cores" in first["cpu"] else f"{first['cpu']}, {first['cores']} cores"
    origin = f"{cpu}; torch {first['torch'].partition('+')[0]}; medians of {first['n']} rounds"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="13" fill="{TEXT}">',
        f"<title>{chart.title}</title>",
        f'<text x="0" y="14" font-weight="bold">{chart.title}</text>',
        f'<text x="0" y="32" font-size="11">{origin}; commit {chart.commit}</text>',
    ]
    for number, row in enumerate(shown):
        parts += bar(chart, row, top=HEAD + ROW * number, scale=scale)
    return "\n".join([*parts, "</svg>", ""])


def bar(chart: Chart, row: dict[str, Any], *, top: int, scale: float) -> list[str]:
    """Label, bar, spread and number of one row."""
    color = OURS if row["contender"].startswith("flambeau") else OTHERS
    low, high = (LABEL + round(row[end] * scale) for end in chart.spread)
    length = round(row[chart.value] * scale)
    base = top + 15
    middle = top + 10
    return [
        f'<text x="{LABEL - 8}" y="{base}" text-anchor="end">{chart.labels[row["contender"]]}</text>',
        f'<rect x="{LABEL}" y="{top + 3}" width="{length}" height="14" fill="{color}"/>',
        f'<path d="M{low},{middle}H{high}" stroke="{TEXT}" stroke-width="2"/>',
        f'<text x="{max(high, LABEL + length) + 6}" y="{base}">{row[chart.value]:.2f}</text>',
    ]


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, chart in CHARTS.items():
        (FOLDER / f"{name}.svg").write_text(svg(chart), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
