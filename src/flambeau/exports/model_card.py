"""README.md of an export: what the model takes and returns, what each step did, where it comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.data.sources.source import IN_FILES
from flambeau.data.sources.wide_source import COLORS
from flambeau.exports.step_figures import StepFigures, as_table
from flambeau.trainer.tasks.task import Task

_INPUT = """\
The model takes decoded pixels and gives {answer}; resizing, cropping and normalization are inside.

| | | |
|---|---|---|
| input `pixels` | (N, H, W, {channels}) {pixels} | upright images of one size; N, H and W are free |
| input `full_size` | (2,) int64 | H and W; of a JPEG decoded at a part of its size, those in full |
| output `logits` | {logits_shape} | |
| output `{answer}` | {answer_shape} | {how} |

{reading}
`Preprocessing.prepare` makes any image ({size}, {size}, {channels}), which the model takes in batches.
"""

_READS_FILES = (
    "`preprocess.py` reads image files so (NumPy and Pillow), and `example.py` predicts on them."
)
_READS_ARRAYS = (
    "Such images are not read from image files here: give `Preprocessing.read_image` an array (H, W, C), "
    "as of `tifffile.imread`,\nand `example.py` files `.npy` of one."
)

_PIXELS = {"uint8": "uint8", "uint16": "float32, levels 0 .. 65535 of 16 bits"}

_CALIBRATED = """\
Divided by {:.4f} before the softmax, the logits are calibrated, on the images below."""

_CPP = """\
`model.aoti.pt2` was compiled for this kind of processor and this version of torch.
`classify.cpp` is the example in C++; its head says how it is built."""

_RUNS = """\
`example.py` loads the model with functions of torch that run what a file holds.
Run it, as any script, only from a folder that you trust."""

_SHOWN_SETTINGS = (
    "model",
    "duration",
    "batch_size",
    "optimizer",
    "lr",
    "weight_decay",
    "label_smoothing",
    "mixup",
    "cutmix",
    "ema",
    "pretrained",
    "seed",
    "image_size",
    "crop",
)


def model_card(about: Mapping[str, Any], figures: Sequence[StepFigures], task: Task) -> str:
    """Markdown from export.json and the figures of the run and each step."""
    measured = about["images"]
    words = task.export_words
    sizes = {"classes": len(about["classes"]), "size": about["image_size"]}
    cpu = _plain(str(about["environment"].get("cpu", "an unnamed processor")))
    model = _plain(str(about["settings"]["model"]))
    several = len(about.get("members", ()))
    model = f"{several} models as one, the first {model}" if several else model
    title = f"{model}, {len(about['classes'])} {words.outputs_are}, as {about['format']}"
    head, *rows = as_table(figures)
    first = figures[0].name.partition(",")[0]
    reads_files = len(about["mean"]) in COLORS and about["pixels"] in IN_FILES
    parts = [
        f"# {title}",
        _INPUT.format(
            channels=len(about["mean"]),
            pixels=_PIXELS.get(about["pixels"], "float32, in the unit of the training images"),
            size=about["image_size"],
            answer=words.answer,
            how=words.answer_how,
            logits_shape=words.logits_shape.format(**sizes),
            answer_shape=words.answer_shape.format(**sizes),
            reading=_READS_FILES if reads_files else _READS_ARRAYS,
        ).rstrip()
        + _calibration(about.get("temperature")),
        *([_CPP if reads_files else _CPP.partition("\n")[0]] if about["format"] == "aoti" else []),
        *([_RUNS] if about["format"] in ("aoti", "torch-export") else []),
        "## What each step did",
        f"On {measured['measured']} of {measured['of']} images, {cpu}; differences of {words.compared} and "
        f"answers are to the {first} itself, times are medians and 95th percentiles.",
        _table(head, rows),
        "## Where it comes from",
        _table(["", ""], _origin(about)),
        f"`export.json` has the {words.outputs_are}, all settings, these figures and the SHA-256 of every "
        "file.",
    ]
    return "\n\n".join(parts) + "\n"


def _calibration(temperature: float | None) -> str:
    return "" if temperature is None else "\n" + _CALIBRATED.format(temperature)


def _origin(about: Mapping[str, Any]) -> list[list[str]]:
    dataset, settings = about["dataset"], about["settings"]
    data = [
        ["training images", str(dataset["train_samples"])],
        ["validation images", str(dataset["val_samples"])],
        ["fingerprint of the training data", str(dataset["train_fingerprint"])],
    ]
    return [
        *(data if dataset["train_samples"] else [["training data", "not known"]]),
        *([name, str(settings[name])] for name in _SHOWN_SETTINGS if name in settings),
        ["flambeau", about["flambeau"]],
        ["torch", str(about["environment"].get("torch"))],
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_plain, line)) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text for one cell of a table, without effect as Markdown or HTML."""
    text = " ".join(text.replace("<", " ").replace(">", " ").split())
    return "".join(f"\\{sign}" if sign in "\\|[]`*_" else sign for sign in text)
