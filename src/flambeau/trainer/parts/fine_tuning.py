"""What `--weights`, `--freeze`, `--recompute`, `--head-lr`, `--layer-decay` do to a model and its groups."""

import shlex
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.data.sources.source import has_unit
from flambeau.errors import InputError, nearest, refusing
from flambeau.recipes.checkpoints.partial_loading import load_partial
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules
from flambeau.recipes.models.classifier_head import Head, find_head
from flambeau.recipes.models.freezing import count_frozen, freeze
from flambeau.recipes.models.layer_decay import group_table, layerwise_lr
from flambeau.recipes.models.param_groups import param_groups
from flambeau.recipes.training.muon import hidden_matrices
from flambeau.run.folder.run_folder import RunFolder, run_around
from flambeau.run.folder.store_run import run_here
from flambeau.terminal import printable
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import MOMENTUM
from flambeau.weights.readers import open_weights, plain_names

BACKBONE = "backbone"
"""The value of `--freeze` for everything but the head."""


def load_weights(model: nn.Module, path: str, *, needs: str | None = None) -> str:
    """Start a model from the matching weights of a file or run; returns lines on what matched.

    `path` is anything that `flambeau convert` reads, or the address of a run; nothing in it is run.
    InputError: no such weights, less than half of the model, or not the tensor `needs`.
    """
    weights = open_weights(run_here(path))
    tensors = plain_names(weights.tensors)
    # Infinity can be intended, as in a mask.
    bad = [n for n, t in tensors.items() if t.is_floating_point() and t.float().isnan().any()]
    if bad:
        raise InputError(f"weights = {path!r}: {bad[0]!r} holds NaN; `flambeau verify` lists all")
    names = model.state_dict().keys()
    prefix = min(tensors, default="").partition(".")[0] + "."  # such as Lightning's 'model.'
    shorter = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if not names & tensors.keys() and len(names & shorter.keys()) == len(shorter):
        tensors = shorter
    try:
        loaded = load_partial(model, tensors)
    except ValueError as error:
        why = str(error).partition("; see rename=")[0]
        why = why.replace("less than min_share=0.5", "less than half")
        raise InputError(f"weights = {path!r} ({weights.source}): {why}") from error
    if needs in loaded.mismatched:
        raise InputError(
            f"weights = {path!r} ({weights.source}): {needs} is {loaded.mismatched[needs]}\n"
            "Give weights for images of as many channels"
        )
    gone = weights.unlisted
    more = f"; {len(gone)} not listed by the index, such as {printable(gone[0])}" if gone else ""
    if weights.others:
        more += (
            f"\nalso there, and not taken: {printable(', '.join(weights.others))} "
            f"(flambeau convert {shlex.quote(path)} NEW --key {printable(weights.others[0])} takes those)"
        )
    return f"{weights.source}: {loaded}{more}"


def weights_normalization(path: str, *, channels: int) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel, in [0, 1], of the run that weights lie in.

    None: the file is of no run, or the run's images have other channels, more than 8 bits, or no known unit.
    """
    here = run_here(path)
    if (here / "config.toml").is_file():
        return _normalization_of(RunFolder(here), channels=channels)
    around = run_around(here)
    try:
        return None if around is None else _normalization_of(RunFolder(around), channels=channels)
    except InputError:
        return None  # the project of another program, whose files have such names


def _normalization_of(run: RunFolder, *, channels: int) -> tuple[list[float], list[float]] | None:
    """As `weights_normalization`; InputError: the run's files cannot be read."""
    learned: DataFacts | Preprocessing
    if run.dataset.is_file():
        learned = DataFacts.read(run.dataset)
        kind = learned.pixels
    elif declared := (run.read_config() or {}).get("preprocess"):  # of a training loop of one's own
        learned = Preprocessing.of(declared)
        kind = learned.kind
    else:
        return None
    is_like_these = len(learned.mean) == channels and has_unit(kind)
    return ([*learned.mean], [*learned.std]) if is_like_these else None


def normalization_lines(path: str, facts: DataFacts) -> list[str]:
    """A line where the images are normalized as in the run that the weights lie in."""
    mean, std = facts.mean, facts.std
    if (mean, std) != weights_normalization(path, channels=facts.channels):
        return []
    shown = (", ".join(f"{one:.3g}" for one in numbers) for numbers in (mean, std))
    return ["images are normalized as in that run: mean {}, standard deviation {}".format(*shown)]


def freeze_parts(model: nn.Module, what: str) -> None:
    """Freeze what a setting names ('none', 'backbone', or patterns between commas), before the optimizer is
    made.

    InputError: a pattern that matches nothing, or nothing is left to train.
    """
    if what == "none":
        return
    before = count_frozen(model)
    try:
        if what == BACKBONE:
            freeze(model, ["*"], but=_head(model, "freeze").layers)
        else:
            freeze(model, _names(what))
    except ValueError as error:
        meant = "" if what == BACKBONE else nearest(what, [BACKBONE]).removeprefix("; ")
        raise InputError(f"freeze = {what!r}: {f'{meant} ' * bool(meant)}{error}") from error
    after = count_frozen(model)
    if not after.num_trainable:
        raise InputError(f"freeze = {what!r} leaves nothing to train")
    if after == before:
        raise InputError(f"freeze = {what!r} has no effect: nothing there is trained; leave it out")


def recompute_parts(model: nn.Module, what: str) -> None:
    """Let modules recompute their activations in backward: 'none', or patterns between commas.

    InputError: a pattern without a match to recompute.
    """
    if what == "none":
        return
    with refusing(f"recompute = {what!r}"):
        checkpoint_modules(model, *_names(what))


def parameter_groups(settings: ResolvedSettings, model: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups of a run: no decay on biases and norms, and learning rates by layer.

    InputError: a model whose head or layers are unknown.
    """
    groups = param_groups(model, weight_decay=settings.weight_decay)
    if settings.muon_others == "sgd" or settings.muon_others_lr is not None:
        others: dict[str, Any] = {"lr": settings.muon_others_lr or settings.lr}
        if settings.muon_others == "sgd":
            others |= {"others": "sgd", "momentum": MOMENTUM["sgd"]}
        groups = _with_settings_of_others(groups, model, others)
    if settings.head_lr is None and settings.layer_decay == 1:
        return groups
    head = [] if settings.head_lr is None else _head(model, "head_lr").parameters
    trained = dict(model.named_parameters())
    if head and not any(trained[name].requires_grad for name in head):
        raise InputError("head_lr has no effect: the last layer is frozen; leave one of them out")
    try:
        groups = layerwise_lr(
            groups,
            model,
            lr=settings.lr,
            layer_decay=settings.layer_decay,
            head=head,
            head_lr=settings.head_lr,
        )
    except ValueError as error:
        why = str(error).partition("; give depths")[0]
        raise InputError(
            f"layer_decay = {settings.layer_decay:g}, head_lr = {settings.head_lr}: {why}"
        ) from error
    decayed = {group["lr"] for group in groups if group["name"] != "head"}
    if settings.layer_decay != 1 and decayed <= {settings.lr}:
        raise InputError(
            "layer_decay has no effect: what it would slow down is frozen; leave one of them out"
        )
    return groups


def _with_settings_of_others(
    groups: list[dict[str, Any]], model: nn.Module, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Split each group into the matrices of muon and the others, which get these settings."""
    matrices = set(hidden_matrices(model))
    split = []
    for group in groups:
        inner = [p for p in group["params"] if p in matrices]
        others = [p for p in group["params"] if p not in matrices]
        split += [{**group, "params": inner}] if inner else []
        split += [{**group, "params": others, **settings}] if others else []
    return split


def report(settings: ResolvedSettings, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    if settings.freeze != "none":
        yield str(count_frozen(model))
    if settings.head_lr is not None or settings.layer_decay != 1:
        yield group_table(optimizer.param_groups, model)


def _names(what: str) -> list[str]:
    names = [part.strip() for part in what.split(",")]
    if "" in names:
        raise ValueError("there is an empty name in it")
    return names


def _head(model: nn.Module, setting: str) -> Head:
    with refusing(f"{setting} needs to know the last layer of the model"):
        return find_head(model)
