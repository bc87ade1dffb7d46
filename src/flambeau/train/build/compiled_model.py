"""The model of `--compile`: torch.compile with a graph for each batch size, made before training begins."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.batch_plan import BatchLayout, share_sizes
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.amp_step import autocast
from flambeau.train.build.model import kept_as_is
from flambeau.train.loop.evaluation_mode import generators_restored
from flambeau.train.settings.resolved_settings import ResolvedSettings


def compiled(model: nn.Module, settings: ResolvedSettings) -> nn.Module:
    """The model as the loop calls it: compiled, if the settings say so; both have the same parameters."""
    if settings.compile == "none":
        return model
    mode = None if settings.compile == "default" else settings.compile
    # One graph for each size: which kernels a batch gets must not depend on the sizes before it, or a
    # resume would have other bits.
    return torch.compile(model, mode=mode, dynamic=False)  # type: ignore[return-value]


def warm_up(
    model: nn.Module,
    settings: ResolvedSettings,
    data: tuple[ImageDataset | DeviceDataset, ImageDataset | DeviceDataset],
    ranks: Ranks,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    device: torch.device,
) -> float:
    """Make all graphs that the training and its evaluations need; weights, buffers and generators stay.

    Args:
        model: compiled.
        settings: of the run.
        data: to train on, and to evaluate on.
        ranks: of the job.
        loss_of: the loss of images (N, C, S, S) uint8 and targets (N,) int64.
        logits_of: the logits of such images.
        device: of the model.

    Returns:
        Seconds.

    Raises:
        InputError: torch cannot compile the model here.
    """
    start = time.perf_counter()
    parameters = [p for p in model.parameters() if p.requires_grad]
    train, val = data
    shape = (train.image_size, train.image_size, train.channels)
    evaluated = (val.image_size, val.image_size, val.channels)
    try:
        with generators_restored(), kept_as_is(model):
            model.train()
            for size in _sizes(len(train), settings, ranks, accumulate=settings.accumulate):
                ranks.beat(f"compiling the model for {size} images")
                targets = torch.zeros(size, dtype=torch.int64, device=device)
                loss = loss_of(_images(size, shape, device), targets)
                torch.autograd.grad(loss, parameters, allow_unused=True)
            model.eval()
            for size in _sizes(len(val), settings, ranks, accumulate=1):
                ranks.beat(f"compiling the model for {size} images of an evaluation")
                with torch.no_grad(), autocast(device, settings.autocast):
                    logits_of(_images(size, evaluated, device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # among others what torch._dynamo raises
        reason = next(line for line in [*str(error).splitlines(), "no reason"] if line.strip())
        raise InputError(
            f"the model cannot be compiled here ({reason:.300}); leave --compile out"
        ) from error
    return time.perf_counter() - start


def _images(size: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise, channels_last in memory as batches are: for other strides another graph would be made."""
    return torch.randint(256, (size, *shape), dtype=torch.uint8).to(device).permute(0, 3, 1, 2)


def _sizes(
    length: int, settings: ResolvedSettings, ranks: Ranks, *, accumulate: int
) -> Sequence[int]:
    layout = BatchLayout(settings.batch_size, accumulate, ranks.rank, ranks.world)
    return share_sizes(length, layout)
