"""One model whose weights are the average of those of several runs: `flambeau soup`.

Source: Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy
without increasing inference time", ICML 2022 (arXiv:2203.05482): the uniform soup, and the greedy soup of its
recipe 1.
Runs that began from different random weights have no average that works: fine-tune them from the same ones.

N: images, C: channels, S: side in pixels.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flambeau.data.sources.source import Source, SubsetSource
from flambeau.data.sources.wide_source import of_kind
from flambeau.errors import InputError, require_folder
from flambeau.provenance import named_code
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing, write_file
from flambeau.recipes.data.sample_order import sample_order
from flambeau.recipes.setup.environment import environment
from flambeau.run.folder.metrics_log import json_numbers
from flambeau.run.folder.published_weights import Result, published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import run_here
from flambeau.run.options.better_figure import better_by_name
from flambeau.run.options.option import values_of
from flambeau.run.options.toml_file import as_toml
from flambeau.trainer.parts.data import EVALUATION, DataFacts, open_data
from flambeau.trainer.prediction.trained_model import (
    BATCH,
    Trained,
    load_trained,
    read_for,
    readable_batches,
)
from flambeau.trainer.settings.default_folder import check_outside
from flambeau.version import __version__

_NORM_IMAGES = 10_000
"""Training images for the statistics of BatchNorm: chosen; the mean of a channel over so many images has a
hundredth of the deviation between two of them."""
_STEP = 0  # of the result: nothing was trained
_SAME = ("model", "image_size", "eval_size", "crop", "qat", "best")
_SAME_FACTS = {
    "task_name": "the task",
    "classes": "the classes",
    "mask_values": "the numbers in masks",
    "channels": "the channels",
    "pixels": "the kind of pixels",
    "mean": "the mean by which images are normalized",
    "std": "the standard deviation by which images are normalized",
    "target_mean": "the mean of the numbers to learn",
    "target_std": "the standard deviation of the numbers to learn",
    "model_file_sha256": "the content of the model's file",
    "val_fingerprint": "the held-out images",
    "val_content": "the content of the held-out images",
    "train_fingerprint": "the training images",
}


@dataclass(frozen=True)
class Ingredient:
    """A run whose weights may go into the soup, their SHA-256, and its figure on held-out images."""

    run: str
    sha256: str
    value: float


@dataclass(frozen=True)
class Soup:
    """What was made.

    Attributes:
        better: whether more or less of it is better.
        greedy_runs: what is in it, in the order of adding.
        took: which of the two is in the folder.
        num_norm_images: training images for BatchNorm's statistics; 0 without BatchNorm.
    """

    folder: str
    figure: str
    better: Literal["max", "min"]
    runs: tuple[Ingredient, ...]
    uniform: float
    greedy: float
    greedy_runs: tuple[str, ...]
    took: Literal["uniform", "greedy"]
    num_norm_images: int

    @property
    def value(self) -> float:
        """The figure of what is in the folder."""
        return self.uniform if self.took == "uniform" else self.greedy

    @property
    def taken(self) -> tuple[str, ...]:
        """The runs in it."""
        return tuple(one.run for one in self.runs) if self.took == "uniform" else self.greedy_runs

    @property
    def best(self) -> Ingredient:
        """The best of the runs."""
        return _sorted(self.runs, self.better)[0]

    @property
    def gain(self) -> float:
        """By how much its figure is better than that of the best run."""
        return (self.value - self.best.value) * (1 if self.better == "max" else -1)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "runs": [asdict(one) for one in self.runs], "gain": self.gain}


@dataclass(frozen=True)
class _Averaging:
    """What all candidates share: the model to put weights into, and the data."""

    trained: Trained
    train: Source
    val: Source
    workers: int

    def candidate(self, states: Sequence[Mapping[str, Tensor]]) -> "_Candidate":
        """The model with the average of these weights, and its figures."""
        model = copy.deepcopy(self.trained.model)
        model.load_state_dict(mean_of_states(states))
        trained = dataclasses.replace(self.trained, model=model.eval())
        num = 0 if len(states) == 1 else self._renew(trained)
        figures, facts = self.evaluated(trained)
        return _Candidate(trained, figures, facts, num)

    def _renew(self, trained: Trained) -> int:
        """Make the statistics of BatchNorm anew; returns the number of images."""
        norms = [one for one in trained.model.modules() if isinstance(one, _BatchNorm)]
        norms = [one for one in norms if one.running_mean is not None]
        if not norms:
            return 0
        # Mixed, as in training: batches of one class would not show the variance between classes.
        order = sample_order(len(self.train), seed=0, epoch=0)[:_NORM_IMAGES]
        loader, _ = read_for(
            trained,
            SubsetSource(self.train, order),
            workers=self.workers,
            skip_bad_images=len(order),
        )
        batches = (batch[0] for _, batch in readable_batches(loader, progress=False))
        return renew_batchnorm(trained, norms, batches)

    def evaluated(self, trained: Trained) -> tuple[dict[str, float], dict[str, Any]]:
        """The figures of the held-out images as a run has them, and the content of evaluation.json."""
        task = trained.facts.task
        settings = trained.settings
        loader, _ = read_for(
            trained, self.val, workers=self.workers, skip_bad_images=settings.skip_bad_images
        )
        kept = task.sample_results(settings.best)
        columns: dict[str, list[Tensor]] = {}
        for indices, (images, targets) in readable_batches(loader, progress=False):
            logits = trained.logits(images)
            wanted = targets.to(logits.device)
            for name, values in task.evaluation_figures(logits, wanted).items():
                columns.setdefault(name, []).append(values.cpu())
            kept.update(torch.tensor(indices), wanted, logits)
        if not columns:
            raise InputError(
                f"no held-out image could be read; the first is {self.val.describe(0)}"
            )
        figures = {name: float(torch.cat(parts).double().mean()) for name, parts in columns.items()}
        figures |= {f"val_{name}": value for name, value in kept.compute().items()}
        facts = task.report_facts(kept.last, step=_STEP, describe=self.val.describe)
        for sample in (*facts["mistakes"], *facts["unsure"]):
            sample.pop("mask", None)  # for a picture, of which there are none here
        return figures, facts | {"findings": [], "suspects": []}


@dataclass(frozen=True)
class _Candidate:
    trained: Trained
    figures: dict[str, float]
    facts: dict[str, Any]
    num_norm_images: int


def make_soup(
    runs: Sequence[str],
    out: Path,
    *,
    workers: int = 0,
    trust: bool = False,
    say: Callable[[str], None],
) -> Soup:
    """Average the weights of finished runs of one network, and write the better of two soups as a run.

    `trust`: as for `load_trained`. InputError: runs that cannot be averaged, `out` exists, or no average is
    better than the best run.
    """
    if len(runs) < 2:
        raise InputError(f"a soup is made of at least two runs, got {len(runs)}")
    require_folder(out)
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: name another folder with --out, or move it away")
    folders = [RunFolder(run_here(run, say)) for run in runs]
    loaded = _loaded(runs, folders, trust=trust, say=say)
    first = loaded[0]
    check_outside(out, first.settings.data)
    train, val = _data(runs[0], folders[0], first, trust=trust, say=say)
    averaging = _Averaging(first, train, val, workers)
    states = [
        {name: tensor.cpu() for name, tensor in one.model.state_dict().items()} for one in loaded
    ]
    figure = first.settings.best
    better = better_by_name(figure)
    assert better is not None  # each figure of `best` has a word that says it

    ingredients = []
    for run, folder, state in zip(runs, folders, states, strict=True):
        value = averaging.candidate([state]).figures[figure]
        ingredients.append(Ingredient(run, _sha256(folder.weights), value))
        say(f"{run}: {figure} {value:.4f}")
    uniform = averaging.candidate(states)
    say(f"uniform, the average of all {len(runs)}: {figure} {uniform.figures[figure]:.4f}")
    by_run = dict(zip(runs, states, strict=True))
    order = [one.run for one in _sorted(ingredients, better)]
    greedy, inside = _greedy(averaging, [(run, by_run[run]) for run in order], figure, better, say)
    together = uniform.figures[figure]
    chosen = greedy.figures[figure]
    soup = Soup(
        str(out),
        figure,
        better,
        tuple(ingredients),
        uniform=together,
        greedy=chosen,
        greedy_runs=tuple(inside),
        took="uniform" if _is_better(together, chosen, better) else "greedy",
        num_norm_images=uniform.num_norm_images,
    )
    if len(soup.taken) == 1:
        _refuse(soup, loaded)
    _write(out, folders[runs.index(order[0])], soup, uniform if soup.took == "uniform" else greedy)
    return soup


def _greedy(
    averaging: _Averaging,
    ranked: Sequence[tuple[str, Mapping[str, Tensor]]],
    figure: str,
    better: Literal["max", "min"],
    say: Callable[[str], None],
) -> tuple[_Candidate, list[str]]:
    """Add each run, the best first, if the figure does not fall; recipe 1 of the paper."""
    (best, state), *others = ranked
    inside = [best]
    states = [state]
    now = averaging.candidate(states)
    for run, state in others:
        tried = averaging.candidate([*states, state])
        before = now.figures[figure]
        after = tried.figures[figure]
        if not _is_better(before, after, better) and after == after:
            inside.append(run)
            states.append(state)
            now = tried
            say(f"greedy, with {run}: {figure} {after:.4f}")
        else:
            say(f"greedy, not with {run}: {figure} would be {after:.4f}")
    return now, inside


def mean_of_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each floating tensor, summed in float64 in the order given; others as in the first."""
    return {
        name: (
            torch.stack([one[name].double() for one in states]).mean(0).to(tensor.dtype)
            if tensor.is_floating_point() and len(states) > 1
            else tensor.clone()
        )
        for name, tensor in states[0].items()
    }


@torch.no_grad()
def renew_batchnorm(trained: Trained, norms: Sequence[nn.Module], batches: Any) -> int:
    """Make running statistics of BatchNorm the plain mean of those of batches, as torch's `update_bn`.

    Other modules stay in evaluation mode. A batch below `BATCH` images is left out, unless it is the only
    one. Returns the number of images.
    """
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()  # type: ignore[operator]
        norm.momentum = None  # type: ignore[assignment]
        norm.train()
    num = 0
    for images in batches:
        if num == 0 or len(images) == BATCH:
            trained.apply(trained.model, images.to(trained.device))
            num += len(images)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.eval()
    if not num:
        raise InputError("no training image could be read for the statistics of BatchNorm")
    return num


def _loaded(
    runs: Sequence[str],
    folders: Sequence[RunFolder],
    *,
    trust: bool,
    say: Callable[[str], None],
) -> list[Trained]:
    """The models, which can be averaged as far as their folders tell."""
    loaded: list[Trained] = []
    for number, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        if run in runs[:number]:
            raise InputError(f"{run} is named twice: a soup is of different runs")
        stored = folder.read_existing()
        if "model" not in stored:
            raise InputError(
                f"{run} is of a training loop of your own, which has not noted its held-out images: a "
                "soup is of runs of `flambeau train`"
            )
        if published(folder) is None:
            raise InputError(f"{run} is not finished: the same `flambeau train` ends it")
        if loaded:
            facts = DataFacts.read(folder.dataset)
            why = _difference(loaded[0], stored, facts)
            if why is not None:
                raise InputError(
                    f"{run} cannot be averaged with {runs[0]}: {why}\nA soup is of runs of one network on "
                    "the same data; `flambeau predict --with RUN` takes others together"
                )
        one = load_trained(folder.path, trust=trust, say=say)
        if one.settings.qat:
            raise InputError(
                f"{run} was trained with --qat: the average of rounded weights is not one"
            )
        loaded.append(dataclasses.replace(one, calibration=None))
        shape = _other_shape(loaded[0].model.state_dict(), one.model.state_dict())
        if shape is not None:
            raise InputError(f"{run} cannot be averaged with {runs[0]}: {shape}")
    return loaded


def _difference(first: Trained, stored: Mapping[str, Any], facts: DataFacts) -> str | None:
    """The first reason why a run has other weights or other figures; None without one."""
    for name, what in _SAME_FACTS.items():
        if getattr(first.facts, name) != getattr(facts, name):
            return f"{what} {'are' if what.endswith('s') else 'is'} another in the two runs"
    ours = values_of(first.settings)
    for name in _SAME:
        theirs = stored.get(name)
        if theirs != ours.get(name) and not (name == "qat" and not theirs and not ours.get(name)):
            return f"its {name} is {theirs}, and the other's {ours.get(name)}"
    return None


def _other_shape(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            return f"only one of them has {name!r}"
        if ours[name].shape != theirs[name].shape:
            return f"{name} is {tuple(ours[name].shape)} in one and {tuple(theirs[name].shape)} in the other"
    return None


def _data(
    run: str, folder: RunFolder, trained: Trained, *, trust: bool, say: Callable[[str], None]
) -> tuple[Source, Source]:
    """The training and the held-out images of the runs, which are those of their start."""
    stored = vars(trained.settings)
    if "data" in named_code(stored):
        folder.permission(folder.read_existing(), trust=trust, say=say).ask_for(stored, "data")
    facts = trained.facts
    try:
        train, val = (
            of_kind(source, facts.pixels, facts.channels) for source in open_data(trained.settings)
        )
    except InputError as error:
        raise InputError(f"the data of {run} cannot be opened: {error}") from error
    is_same = (train.fingerprint, val.fingerprint) == (
        facts.train_fingerprint,
        facts.val_fingerprint,
    )
    if not is_same:
        raise InputError(
            f"the data of {run} have changed since it was started, so its held-out images are not known: "
            "restore them"
        )
    return train, val


def _refuse(soup: Soup, loaded: Sequence[Trained]) -> None:
    """Raise InputError: no average is as good as the best run alone."""
    best = soup.best
    from_noise = [
        one.settings for one in loaded if not (one.settings.weights or one.settings.pretrained)
    ]
    why = (
        f"Runs {'that began' if from_noise else 'whose weights have moved far apart, or that began'} from "
        "different random weights have no average that works: fine-tune all from the same ones, with "
        "--weights RUN or --pretrained; `flambeau predict --with` takes these runs together"
    )
    raise InputError(
        f"no average is as good as {best.run} alone ({soup.figure} {best.value:.4f}; all together "
        f"{soup.uniform:.4f}): nothing is written\n{why}"
    )


def _write(out: Path, best: RunFolder, soup: Soup, taken: _Candidate) -> None:
    """Write the folder whole or not at all."""
    trained = taken.trained
    state = {name: tensor.cpu().contiguous() for name, tensor in trained.model.state_dict().items()}
    weights = safetensors.torch.save(state, metadata={"format": "pt"})
    result = Result("soup", _STEP, json_numbers(taken.figures), hashlib.sha256(weights).hexdigest())
    about = {"flambeau": __version__, **soup.as_dict(), "folder": None}
    config = {**best.read_existing()}
    config.pop("extend", None)
    config.pop("mirror", None)
    files = {
        "environment.json": json.dumps(environment(), indent=2).encode() + b"\n",
        "dataset.json": best.dataset.read_bytes(),
        EVALUATION: json.dumps(taken.facts, ensure_ascii=False).encode() + b"\n",
        "soup.json": json.dumps(about, indent=2, ensure_ascii=False).encode() + b"\n",
        "model.safetensors": weights,
        "result.json": json.dumps(asdict(result), indent=2).encode() + b"\n",
        "config.toml": as_toml(config),
    }
    with replacing(out, disk=Disk()) as folder:
        (folder / "checkpoints").mkdir(parents=True)
        for file, content in files.items():
            write_file(folder / file, content)
        if out.exists() or out.is_symlink():
            raise InputError(f"{out} has been made meanwhile: nothing is written")
    RunFolder(out).record_made_here()


def _sorted(runs: Sequence[Ingredient], better: Literal["max", "min"]) -> list[Ingredient]:
    """The best first; of equal ones, those that were named first. NaN is last."""
    sign = -1 if better == "max" else 1
    return sorted(runs, key=lambda one: (one.value != one.value, sign * one.value))


def _is_better(one: float, other: float, better: Literal["max", "min"]) -> bool:
    if other != other:
        return one == one
    return one > other if better == "max" else one < other


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
