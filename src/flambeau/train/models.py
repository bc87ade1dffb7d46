"""Models by name: timm's, torchvision's, the small one of the house, or a function in a file."""

import importlib.util
import inspect
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flambeau.data.errors import InputError
from flambeau.train.config import nearest

SMALL = "small_convnet"


def build_model(
    name: str, *, num_classes: int, channels: int, image_size: int, pretrained: bool = False
) -> nn.Module:
    """Make a classifier.

    Args:
        name: a timm name, 'torchvision:NAME', 'small_convnet', or 'FILE.py:FUNCTION'.
        num_classes: length of its logits.
        channels: of its input, 1 or 3.
        image_size: side of its input; models with positions for patches are made for it.
        pretrained: start from published weights, with a new head where the number of classes differs.

    Raises:
        InputError: an unknown name, a file that does not do, weights that cannot be had.
    """
    if name == SMALL:
        from flambeau.recipes.models.small_convnet import SmallConvNet

        return SmallConvNet(channels, num_classes)
    if name.startswith("torchvision:"):
        return _torchvision(name.removeprefix("torchvision:"), num_classes, channels, pretrained)
    if ".py:" in name:
        return _from_file(name, num_classes, channels, image_size)
    return _timm(name, num_classes, channels, image_size, pretrained)


def input_channels(name: str, *, grey: bool) -> int:
    """How many channels the images of a run should have: torchvision's models want three."""
    return 1 if grey and not name.startswith("torchvision:") else 3


def pretrained_normalization(name: str, *, channels: int) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation a channel, in [0, 1], that published weights were trained with."""
    if name.startswith("torchvision:"):
        return [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's, in all of its presets
    import timm

    published = timm.get_pretrained_cfg(name)
    if published is None:
        return None
    mean, std = list(published.mean), list(published.std)
    if channels == 1:  # timm then sums the filters over the channels: one mean for all
        mean, std = [sum(mean) / len(mean)], [sum(std) / len(std)]
    return mean, std


def _timm(
    name: str, num_classes: int, channels: int, image_size: int, pretrained: bool
) -> nn.Module:
    import timm

    if not timm.is_model(name):
        known = timm.list_models() + timm.list_pretrained()
        raise InputError(
            f"unknown model '{name}'{nearest(name, [*known, SMALL])} "
            "(timm names as they are; torchvision:NAME; FILE.py:FUNCTION)"
        )
    default = timm.get_pretrained_cfg(name)
    size: dict[str, Any] = (
        {"img_size": image_size} if default is not None and default.fixed_input_size else {}
    )
    try:
        model = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, in_chans=channels, **size
        )
    except Exception as error:
        if pretrained:
            raise InputError(
                f"the published weights of '{name}' could not be had: {_first_line(error)}; "
                "check the connection, or leave --pretrained out"
            ) from error
        raise InputError(
            f"timm cannot make '{name}' for {channels} channels at {image_size} pixels: {_first_line(error)}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _torchvision(name: str, num_classes: int, channels: int, pretrained: bool) -> nn.Module:
    from torchvision.models import get_model, get_model_weights, list_models

    known = [n for n in list_models() if "/" not in n]
    if name not in known:
        raise InputError(f"unknown model 'torchvision:{name}'{nearest(name, known)}")
    if channels != 3:
        raise InputError(f"torchvision:{name} takes 3 channels, got {channels}")
    try:
        model = get_model(name, num_classes=num_classes)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"torchvision:{name} cannot be made as a classifier: {_first_line(error)}"
        ) from error
    assert isinstance(model, nn.Module)
    if pretrained:
        try:
            weights = get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
        except (OSError, RuntimeError, AttributeError) as error:
            raise InputError(
                f"the published weights of 'torchvision:{name}' could not be had: {_first_line(error)}; "
                "check the connection, or leave --pretrained out"
            ) from error
        own = model.state_dict()
        fitting = {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
        model.load_state_dict(fitting, strict=False)  # all but the head
    return model


def _from_file(name: str, num_classes: int, channels: int, image_size: int) -> nn.Module:
    path_text, _, function_name = name.rpartition(":")
    function = getattr(_load_module(Path(path_text)), function_name, None)
    if not callable(function):
        raise InputError(f"{path_text} has no function '{function_name}'; --model FILE.py:FUNCTION")
    offered = {"num_classes": num_classes, "channels": channels, "image_size": image_size}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        wanted = offered
    else:
        wanted = {k: v for k, v in offered.items() if k in parameters}
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.name not in wanted
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise InputError(
            f"{name} asks for {missing[0]!r}; it is called with any of {', '.join(offered)}"
        )
    model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} must return a torch.nn.Module, it returned {type(model).__name__}"
        )
    return model


def _load_module(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise InputError(f"--model: {path} is not a file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_output(model: nn.Module, *, num_classes: int, channels: int, image_size: int) -> None:
    """Run one image through the model, so that a wrong shape is seen before the first step.

    Raises:
        InputError: the forward pass fails, or the logits are not (N, num_classes).
    """
    parameter = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            image = torch.zeros(1, channels, image_size, image_size, device=parameter.device)
            logits: Any = model(image)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise InputError(
            f"the model fails on an image of {channels} x {image_size} x {image_size}: {_first_line(error)}"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (1, num_classes):
        raise InputError(
            f"the model must give logits of shape (N, {num_classes}); it gives {shape}"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
