"""`--batch-size auto`: how many samples of a step fit into memory at once, found by trying."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks, local_world
from flambeau.recipes.memory.batch_size_finder import free_bytes, largest_batch
from flambeau.recipes.setup.environment import usable_memory
from flambeau.run.loop.evaluation_mode import generators_restored
from flambeau.run.loop.memory_guard import least_micro_batch
from flambeau.run.loop.progress_bar import peak_bytes
from flambeau.trainer.parts.data import noise_batch, noise_targets
from flambeau.trainer.parts.model import kept_as_is
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS

_LATER_BYTES = 2**27  # on a CPU: for threads that the loop starts later


def find_micro_batch(
    model: nn.Module,
    optimizer: Optimizer,
    settings: ResolvedSettings,
    data: ImageDataset | DeviceDataset,
    ranks: Ranks,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> tuple[int, str]:
    """The largest micro-batch (of all processes) that fits on all ranks, and a line.

    `model` is as the loop calls it; `loss_of` takes uint8 images and targets. InputError: none fits, or this
    cannot be tried here.
    """
    _check(settings, ranks, device)
    whole = min(settings.batch_size, len(data))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def trial(size: int) -> None:
        ranks.beat(f"trying whether {size} images fit into memory")
        share = -(-size // ranks.world)
        for is_last in (False, True):  # the second pass has gradients and optimizer state in memory
            images = noise_batch(data, share, device)
            loss_of(images, noise_targets(data, share, device)).backward()
            if not is_last:
                optimizer.step()

    def search() -> int:
        with _undone(parameters, optimizer), kept_as_is(model), generators_restored():
            model.train()
            least = min(whole, least_micro_batch(model, ranks.world))
            limit = _limit_bytes(ranks.world) if device.type == "cpu" else None
            size = largest_batch(trial, _sizes(whole, least), device=device, limit_bytes=limit)
        if size is None:
            raise InputError(f"out of memory, with {least} samples at once\n{BY_FLAGS.save_memory}")
        return size

    fitting = min(ranks.gather(ranks.each(search)))
    if fitting == whole:
        return settings.batch_size, f"all {settings.batch_size} samples of a step fit into memory"
    num = math.ceil(settings.batch_size / fitting)
    return fitting, f"{fitting} samples fit into memory at once: {num} forward passes per step"


def _check(settings: ResolvedSettings, ranks: Ranks, device: torch.device) -> None:
    for name, value in (("shard", settings.shard != "none"), ("sync_bn", settings.sync_bn)):
        if value and ranks.world > 1:
            raise InputError(
                f"batch_size = 'auto' and {name} do not go together: a process that runs out of memory would "
                "leave the others waiting in the same forward pass; give batch_size a number"
            )
    if device.type == "cpu":
        try:
            free_bytes()
        except (ImportError, OSError):
            raise InputError(
                "batch_size = 'auto' on a CPU needs Linux, where the memory of a process can be limited; "
                "give batch_size a number"
            ) from None


def _limit_bytes(world: int) -> int:
    """The memory for one process, out of that of the machine or container."""
    most = usable_memory()
    left = free_bytes()
    if most is not None:
        left = min(left, max(0, most - world * peak_bytes(torch.device("cpu"))))
    return max(0, left // min(world, local_world()) - _LATER_BYTES)


def _sizes(whole: int, least: int) -> list[int]:
    """Micro-batches that divide a step about evenly, from the least to all of it."""
    root = math.isqrt(whole)
    even = {-(-whole // num) for num in range(1, root + 1)} | set(range(1, root + 1))
    return sorted(size for size in even | {least} if size >= least)


@contextlib.contextmanager
def _undone(parameters: list[nn.Parameter], optimizer: Optimizer) -> Iterator[None]:
    """Restore the parameters and the optimizer's state at the end, and drop the gradients.

    The copy stands in for the memory of averaged weights.
    """
    before = [p.detach().clone() for p in parameters]
    state = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
