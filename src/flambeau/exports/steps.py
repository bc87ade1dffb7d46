"""Takes and measures the steps of an export, and refuses one that changes predictions or is slower."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.data.sources.source import Source
from flambeau.errors import InputError, refusing
from flambeau.exports.fine_tune import check_duration, fine_tune
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.formats.classifier import Classifier, ModelFormat, first_output
from flambeau.exports.formats.onnx_int8 import quantize_dynamic, quantize_static
from flambeau.exports.served_model import ServedModel, served
from flambeau.exports.step_figures import Stage, StepFigures, figures_of
from flambeau.provenance import made_now
from flambeau.recipes.compress.fake_quantize import fake_quantize, to_integers
from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm
from flambeau.recipes.compress.prune_channels import prune_channels
from flambeau.recipes.compress.reparameterize import reparameterize
from flambeau.trainer.parts.qat_model import is_batchnorm
from flambeau.trainer.prediction.ensemble import Model, members_of
from flambeau.trainer.prediction.sample_images import SampleImages

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = ("int8", "dynamic")
_REPEATS = 0.01
"""Share of the largest logit by which two calls may differ, since GPUs add in no fixed order; chosen."""
SLOWER = 1.1
"""A step may take so many times as long as the one before: less is the noise of a shared machine."""


@dataclass(frozen=True)
class ExportPlan:
    """The format and the steps of an export.

    Attributes:
        reparameterize: merge blocks of branches into one convolution each.
        prune: share of the channels to remove where possible.
        fine_tune: duration after pruning or 'qat'; None for an epoch.
        quantize: 'int8', 'dynamic', 'qat', 'fp16', 'bf16' or None.
        min_agreement: share of images that must keep the run's prediction.
        allow_slower: keep a step slower than the one before.
    """

    format: str = "torch-export"
    fold: bool = False
    reparameterize: bool = False
    prune: float | None = None
    fine_tune: str | None = None
    quantize: str | None = None
    min_agreement: float = 0.99
    allow_slower: bool = False

    def check(self) -> None:
        """Raise InputError for settings that contradict each other or are out of range."""
        if self.quantize in INTEGERS and self.format != "onnx":
            raise InputError(
                f"--quantize {self.quantize} needs --format onnx: its integers are those of ONNX Runtime"
            )
        if self.quantize == "qat" and self.format != "onnx":
            raise InputError(
                "--quantize qat needs --format onnx: torch computes with rounded floating-point numbers"
            )
        if self.quantize == "bf16" and self.format == "onnx":
            raise InputError(
                "--quantize bf16 does not go with --format onnx: ONNX Runtime has no bfloat16 convolution "
                "for processors\nTake --quantize fp16, or --format torch-export"
            )
        changed = self.fold or self.reparameterize or self.prune is not None
        if self.format == "safetensors" and changed:
            raise InputError(
                "--format safetensors holds weights of the model's own class, and that step makes another "
                "one\nTake --format torch-export, which holds the graph"
            )
        if self.prune is not None and not 0 < self.prune < 1:
            raise InputError(f"--prune must be between 0 and 1, got {self.prune:g}")
        check_duration(self.fine_tune, used=self.trains)
        if not 0 <= self.min_agreement <= 1:
            raise InputError(f"--min-agreement must be from 0 to 1, got {self.min_agreement:g}")

    def check_of_several(self) -> None:
        """Raise InputError for steps that do not apply to several runs as one."""
        flags = {
            "--prune": self.prune is not None,
            "--quantize qat": self.quantize == "qat",
            "--format safetensors": self.format == "safetensors",
        }
        for flag in (name for name, given in flags.items() if given):
            raise InputError(
                f"{flag} is for one run, and --with makes one graph of several: leave one of them out"
            )

    def check_rounded(self, run: Path) -> None:
        """InputError for steps that do not apply to a run of `flambeau train --qat`."""
        flags = {
            "--fold": self.fold,
            "--reparameterize": self.reparameterize,
            "--prune": self.prune is not None,
            "--quantize": self.quantize is not None,
            "--format safetensors": self.format == "safetensors",
        }
        for flag in (name for name, given in flags.items() if given):
            raise InputError(
                f"{run} was trained with --qat, folded and rounded: {flag} does not go with that\n"
                f"Leave it out{' and take --format onnx' * (self.format != 'onnx')}"
            )

    @property
    def changes_answers(self) -> bool:
        """Whether a step changes answers, so that no coverage was measured."""
        return self.prune is not None or self.quantize is not None

    @property
    def measures_ranges(self) -> bool:
        return self.quantize in ("int8", "qat")

    @property
    def trains(self) -> bool:
        return self.prune is not None or self.quantize == "qat"


@dataclass(frozen=True)
class Steps:
    """The pipeline of one export.

    Attributes:
        images: for the figures of each step.
        ranges: images for the ranges of int8; None if no step measures them.
        sources: training and validation data; None if no step trains.
        subject: what is exported, in messages.
    """

    trained: Model
    plan: ExportPlan
    images: SampleImages
    ranges: SampleImages | None
    sources: tuple[Source, Source] | None
    say: Callable[[str], object]
    subject: str = "run"

    def write(self, folder: Path, *, scratch: Path) -> list[StepFigures]:
        """Write the model's file into a folder, and return the figures of the run and each step.

        Steps that train write their runs below `scratch`.

        InputError: a step is refused, or the format cannot be written.
        """
        model = served(self.trained)
        task = self.trained.facts.task
        precision = self._precision
        own = "run" if self.subject == "model" else self.subject
        first = self.subject if precision == "fp32" else f"{own}, fp32 for {precision}"
        stage = _eager(first, model)
        batches = self.images.pixels.permute(0, 3, 1, 2).split(32)
        base = torch.cat([self.trained.logits(part).cpu() for part in batches])
        self._check_repeats(batches[0], base[: len(batches[0])])
        self.say(f"{stage.name}: measuring on {len(base)} images")
        figures = [figures_of(stage, None, base, self.images, task=task)]
        self._accept(figures[0], requested=True)

        def measure(after: Stage, *, requested: bool = False) -> None:
            nonlocal stage
            self.say(f"{after.name}: measuring")
            figure = figures_of(after, stage, base, self.images, task=task)
            self._accept(figure, requested=requested)
            figures.append(figure)
            stage = after

        for name, change in self._changes(scratch):
            model = model.changed(change)
            measure(_eager(name, model), requested=name == "qat")  # whose speed is that of its file
        format_ = FORMATS[self.plan.format]
        path = folder / format_.file
        self.say(f"{format_.name}: writing")
        format_.write(model, path)
        measure(_of_file(format_.name, path, format_), requested=True)
        if self.plan.quantize in INTEGERS:
            whole = path.rename(path.with_suffix(".fp32.onnx"))
            stage = replace(stage, open=_once(whole, format_))
            self._quantize(whole, path)
            measure(_of_file(self.plan.quantize, path, format_))
            whole.unlink()
        return figures

    @property
    def _precision(self) -> str:
        """In which the run was evaluated; of several runs the first that was not in float32."""
        all_of_them = [one.settings.precision for one in members_of(self.trained)]
        return next((one for one in all_of_them if one != "fp32"), "fp32")

    def _changes(self, scratch: Path) -> list[tuple[str, Callable[[nn.Module], nn.Module]]]:
        side = self.trained.image_size
        channels = self.trained.facts.channels
        example = torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))
        changes: list[tuple[str, Callable[[nn.Module], nn.Module]]] = []
        if self.plan.reparameterize:
            changes.append(("reparameterize", lambda model: self._fused(model, example)))
        if self.plan.prune is not None:
            changes.append(
                ("prune", lambda model: self._pruned(model, example, scratch / "pruned"))
            )
        rounds = self.plan.quantize == "qat"  # rounds folded weights
        if self.plan.fold or (rounds and any(map(is_batchnorm, self.trained.model.modules()))):
            changes.append(("fold", lambda model: self._folded(model, example)))
        if self.trained.settings.qat:
            changes.append(("qat", to_integers))
        if rounds:
            changes.append(("qat", lambda model: self._rounded(model, scratch / "rounded")))
        if self.plan.quantize in HALVES:
            dtype = HALVES[self.plan.quantize]
            changes.append((self.plan.quantize, lambda model: copy.deepcopy(model).to(dtype)))
        return changes

    def _folded(self, model: nn.Module, example: Tensor) -> nn.Module:
        with refusing("--fold"):
            result = fold_batchnorm(model, example)
        if not result.folded:
            gone = " left after --reparameterize" if self.plan.reparameterize else ""
            why = next(iter(result.left.values()), f"it has no BatchNorm{gone}")
            raise InputError(f"--fold changes nothing in {self.trained.settings.model}: {why}")
        for name, why in result.left.items():
            self.say(f"fold: {name} stays: {why}")
        self.say(
            f"fold: {len(result.folded)} of {len(result.folded) + len(result.left)} BatchNorms"
        )
        return result.model

    def _fused(self, model: nn.Module, example: Tensor) -> nn.Module:
        with refusing("--reparameterize"):
            result = reparameterize(model, example)
        self.say(f"reparameterize: {len(result.fused)} blocks")
        return result.model

    def _pruned(self, model: nn.Module, example: Tensor, scratch: Path) -> nn.Module:
        assert self.plan.prune is not None
        with refusing("--prune"):
            result = prune_channels(model, example[:1], amount=self.plan.prune)
        for name, why in result.left.items():
            self.say(f"prune: {name} keeps its channels: {why}")
        return self._trained(result.model, scratch)

    def _rounded(self, model: nn.Module, scratch: Path) -> nn.Module:
        assert self.ranges is not None
        [trained] = members_of(self.trained)
        batches = [batch.cpu() for batch in self.ranges.normalized(trained)]
        rounded = fake_quantize(model, batches).model
        return to_integers(self._trained(rounded, scratch))

    def _trained(self, network: nn.Module, scratch: Path) -> nn.Module:
        assert self.sources is not None
        [trained] = members_of(self.trained)  # of several it is refused before
        return fine_tune(network, trained, self.sources, scratch, self.plan.fine_tune or "1ep")

    def _quantize(self, source: Path, target: Path) -> None:
        self.say(f"{self.plan.quantize}: quantizing")
        if self.plan.quantize == "dynamic":
            quantize_dynamic(source, target)
            return
        assert self.ranges is not None
        quantize_static(source, target, self.ranges.pixels)

    def _check_repeats(self, images: Tensor, before: Tensor) -> None:
        """Refuse a model whose outputs are random: the effect of a step could not be measured."""
        off = (self.trained.logits(images).cpu() - before).abs().max()
        if off > _REPEATS * before.abs().max():
            raise InputError(
                f"{self.trained.settings.model} gives other answers to the same images when it is asked again"
                "\nIs something random in its forward(), such as functional.dropout(x) without "
                "training=self.training?"
            )

    def _accept(self, figures: StepFigures, *, requested: bool) -> None:
        if figures.agreement < self.plan.min_agreement:
            shown = f" ({figures.figure_name} {figures.figure_text})"
            more = "" if figures.figure is None else shown
            raise InputError(
                f"{figures.name} gives the answer of the {self.subject} on {figures.agreement:.2%} of "
                f"{len(self.images)} images, and --min-agreement is {self.plan.min_agreement:.2%}{more}: "
                "nothing is written\n"
                f"{self._instead_of(figures.name)}, or allow it by a smaller --min-agreement"
            )
        times = figures.times_before
        if not requested and not self.plan.allow_slower and times is not None and times > SLOWER:
            raise InputError(
                f"{figures.name} takes {times:.2f} times as long as before, here: nothing is written\n"
                "Leave that step out, or keep it by --allow-slower"
            )

    def _instead_of(self, step: str) -> str:
        if step in FORMATS:
            return "Take another --format"
        if step.startswith(("run", "ensemble")):
            precision = self._precision
            return f"The run was evaluated in {precision}, and an export computes in float32"
        return "Leave that step out"


def _eager(name: str, model: ServedModel) -> Stage:
    size = sum(tensor.nbytes for tensor in model.network.state_dict().values())
    return Stage(name, lambda _: first_output(model), size)


def _of_file(name: str, path: Path, format_: ModelFormat) -> Stage:
    return Stage(name, _once(path, format_), path.stat().st_size)


def _once(path: Path, format_: ModelFormat) -> Callable[[int], Classifier]:
    """Opens the file once per number of threads: it is measured beside the stages before and after it."""
    return functools.cache(lambda threads: format_.open(path, threads, made_now(path.parent)))
