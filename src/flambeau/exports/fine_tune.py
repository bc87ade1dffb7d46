"""A short training of a changed network towards the labels and predictions of its run."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flambeau.data.sources.source import Source
from flambeau.errors import InputError
from flambeau.run.options.durations import parse_duration
from flambeau.run.run import Run
from flambeau.trainer.parts.data import Prepared, datasets
from flambeau.trainer.prediction.trained_model import Trained

_LR = 3e-4  # of AdamW, down to 0 by a cosine; chosen
_ROUNDING = ("scale", "zero_point")  # of fake_quantize, which decay must not pull to 0


def fine_tune(
    network: nn.Module,
    trained: Trained,
    sources: tuple[Source, Source],
    folder: Path,
    duration: str,
) -> nn.Module:
    """Train a network in place; half of the loss is of the labels, half of the run's predictions.

    Checkpoints go to `folder`, which may be removed afterwards. Returns it in evaluation mode on the CPU.
    """
    # The network gives plain logits, which the graph divides by the temperature.
    plain = dataclasses.replace(trained, calibration=None)
    settings = trained.settings
    task = trained.facts.task
    data, _ = datasets(Prepared(settings, trained.facts, *sources))
    network = network.train().to(trained.device)
    exempt = [p for name, p in network.named_parameters() if name.rpartition(".")[2] in _ROUNDING]
    decayed = [p for p in network.parameters() if all(p is not other for other in exempt)]
    groups: list[dict[str, Any]] = [{"params": decayed}]
    groups += [{"params": exempt, "weight_decay": 0.0}] if exempt else []
    run = Run(
        folder,
        network,
        torch.optim.AdamW(groups, lr=_LR),
        data,
        duration=duration,
        batch_size=settings.batch_size,
        schedule="cosine",
        seed=settings.seed,
        workers=settings.workers,
    )
    for _ in run.epochs():
        for images, targets in run.batches():
            with torch.no_grad():
                reference = plain.logits(images)
            logits = network(trained.normalize(images))
            loss = task.loss(logits, targets, smoothing=0.0, weight=None)
            loss = loss + task.loss_towards(logits, reference)
            run.step(loss / 2)
    return network.eval().cpu()


def check_duration(duration: str | None, *, used: bool) -> None:
    """InputError for an unreadable duration or 0, and if no step trains."""
    if duration is not None and not used:
        raise InputError(
            "--fine-tune trains a pruned network or one of --quantize qat: give one of them, or leave it out"
        )
    if duration is not None and not parse_duration(duration, name="--fine-tune").amount:
        raise InputError(f"--fine-tune {duration} trains nothing: such as 1ep or 500st")
