"""`--compile`: torch.compile with a graph for each batch size, made before training begins."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.batch_layout import Layout, layout_of
from flambeau.data.loading.batch_plan import share_sizes
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory, release_memory
from flambeau.recipes.training.amp_step import autocast
from flambeau.run.loop.evaluation_mode import generators_restored
from flambeau.run.loop.memory_guard import least_micro_batch
from flambeau.trainer.parts.data import noise_batch, noise_targets
from flambeau.trainer.parts.model import kept_as_is
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS


def compiled(model: nn.Module, settings: ResolvedSettings) -> nn.Module:
    """The model as the loop calls it, compiled if set; both share their parameters."""
    if settings.compile == "none":
        return model
    mode = None if settings.compile == "default" else settings.compile
    # One graph per size: the kernels of a batch must not depend on earlier sizes, or a resume would have
    # other bits.
    return torch.compile(model, mode=mode, dynamic=False)  # type: ignore[return-value]


def warm_up(
    model: nn.Module,
    settings: ResolvedSettings,
    data: tuple[ImageDataset | DeviceDataset, ImageDataset | DeviceDataset],
    ranks: Ranks,
    *,
    micro_batch: int | None,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    device: torch.device,
) -> tuple[float, int]:
    """Make all graphs for training and evaluation; weights, buffers and generators stay.

    Returns seconds, and the samples per forward pass that fit on all ranks. InputError: torch cannot compile
    the model here, or it does not fit.
    """
    start = time.perf_counter()
    layout = layout_of(
        settings.batch_size,
        accumulate=settings.accumulate,
        parts=settings.parts,
        rank=ranks.rank,
        world=ranks.world,
    )
    if micro_batch is not None:
        layout = layout.with_micro_batches(min(micro_batch, layout.micro_batch_size))

    parameters = [p for p in model.parameters() if p.requires_grad]
    train, val = data

    def attempt(layout: Layout) -> bool:
        at_once = layout.in_batches_of(layout.micro_batch_size)
        try:
            with generators_restored(), kept_as_is(model):
                model.train()
                for size in share_sizes(len(train), layout):
                    ranks.beat(f"compiling the model for {size} images")
                    targets = noise_targets(train, size, device)
                    loss = loss_of(noise_batch(train, size, device), targets)
                    torch.autograd.grad(loss, parameters, allow_unused=True)
                model.eval()
                for size in share_sizes(len(val), at_once):
                    ranks.beat(f"compiling the model for {size} images of an evaluation")
                    with torch.no_grad(), autocast(device, settings.autocast):
                        logits_of(noise_batch(val, size, device))
        except Exception as error:
            if is_out_of_memory(error):
                release_memory(error)
                return False
            if not isinstance(error, RuntimeError):  # includes those of torch._dynamo
                raise
            reason = next(line for line in [*str(error).splitlines(), "no reason"] if line.strip())
            raise InputError(
                f"the model cannot be compiled here ({reason:.300}); leave --compile out"
            ) from error
        return True

    while not all(ranks.gather(ranks.each(partial(attempt, layout)))):
        smaller = layout.halved(min_size=least_micro_batch(model, layout.world))
        if smaller is None:
            raise InputError(
                f"out of memory, with {layout.micro_batch_size} samples at once\n{BY_FLAGS.save_memory}"
            )
        layout = smaller
    return time.perf_counter() - start, layout.micro_batch_size
