"""The model of `--qat`: BatchNorm folded, convolutions and linear layers rounded to eight bits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flambeau.errors import refusing
from flambeau.recipes.compress.fake_quantize import fake_quantize
from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.parts.model import kept_as_is
from flambeau.trainer.settings.resolved_settings import ResolvedSettings


def qat_model(
    model: nn.Module,
    settings: ResolvedSettings,
    facts: DataFacts,
    normalized: Callable[[], list[Tensor]] | None = None,
) -> nn.Module:
    """The model with fake quantization if the settings say so, else unchanged.

    `normalized` returns batches of normalized images for the initial ranges; None if these will be loaded.
    InputError: torch.fx cannot trace the model, or nothing to quantize.
    """
    if not settings.qat:
        return model
    device = next(model.parameters()).device
    shape = (2, facts.channels, settings.image_size, settings.image_size)
    example = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    with refusing(f"{settings.model} cannot be trained with qat"), kept_as_is(model):
        model.eval()
        if any(is_batchnorm(module) for module in model.modules()):
            model = fold_batchnorm(model, example).model
        batches = [example] if normalized is None else normalized()
        model = fake_quantize(model, batches).model
    return model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]


def is_batchnorm(module: nn.Module) -> bool:
    """Torch's, or a class of another library with such a name."""
    return "BatchNorm" in type(module).__name__
