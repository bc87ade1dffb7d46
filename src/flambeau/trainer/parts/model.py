"""Models by name: timm's, torchvision's, flambeau's small ones, those of smp, or a function in a file."""

import contextlib
import importlib
import itertools
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from flambeau.data.sources.wide_source import COLORS
from flambeau.errors import InputError, nearest
from flambeau.optional_packages import extra, large_import
from flambeau.run.loop.model_builder import build_from_file
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.parts.device import pick_device
from flambeau.trainer.parts.pixel_models import MainOutput, PyramidSegmenter
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.user_code import first_line, is_function

SMALL = "small_convnet"
TINY = "tiny_convnet"
OWN_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (recipe, its class, what else that takes)
    SMALL: ("small_convnet", "SmallConvNet", {"width": 32}),
    TINY: ("small_convnet", "SmallConvNet", {"width": 16}),
    "speedrun_convnet": ("speedrun_convnet", "SpeedrunConvNet", {}),
    "speedrun_convnet_wide": ("speedrun_convnet", "SpeedrunConvNet", {"widths": (128, 384, 384)}),
}
_MOST_TIMES = 4  # more numbers of a model than of its weights, which may be tied or packed; chosen
_FEW_NUMBERS = 10**7
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # mean and standard deviation, in [0, 1]


def build_model(
    name: str,
    *,
    num_classes: int,
    channels: int,
    image_size: int,
    pretrained: bool = False,
    drop_path: float = 0.0,
    per_pixel: bool = False,
) -> nn.Module:
    """Make a classifier of images, or of their pixels.

    Args:
        name: a timm name, 'torchvision:NAME', one of OWN_MODELS, or 'FILE.py:FUNCTION'. A suffix chooses
            among published weights: 'resnet50.a1_in1k', 'torchvision:resnet50.IMAGENET1K_V1'.
        channels: of its input. Published weights, for three, are adapted as in timm: summed up for one, else
            repeated and rescaled.
        pretrained: published weights, with a new head for another number of classes.
        drop_path: probability of stochastic depth (of the deepest block, if it rises with depth).
        per_pixel: outputs for each pixel: a timm name is an encoder's, and 'smp:ARCHITECTURE' or
            'smp:ARCHITECTURE/ENCODER' of segmentation_models_pytorch.
    """
    make = _build_per_pixel if per_pixel else _build
    model = make(name, num_classes, channels, image_size, pretrained, drop_path)
    if drop_path and not any(_drops_paths(module) for module in model.modules()):
        raise InputError(_without_effect(drop_path, name))
    return model


def check_claim(
    name: str, weights: Mapping[str, Tensor], *, per_pixel: bool = False, **shape: int
) -> None:
    """Refuse a model that is far larger than its weights, before memory for it is taken.

    A folder from elsewhere may name any model. One in the user's file is not checked. `shape`: as for
    `build_model`.
    """
    if is_function(name):
        return
    try:
        with torch.device("meta"):
            make = _build_per_pixel if per_pixel else _build
            model = make(name, pretrained=False, drop_path=0.0, **shape)
    # It reads values while it is made, or cannot be made, which `build_model` says.
    except (InputError, RuntimeError, TypeError, ValueError):
        return
    claimed = sum(tensor.numel() for tensor in model.state_dict().values())
    held = sum(tensor.numel() for tensor in weights.values())
    if claimed > _MOST_TIMES * held + _FEW_NUMBERS:
        raise InputError(f"{name} has {claimed} numbers, and its file of weights {held}")


def check_model_name(name: str, *, per_pixel: bool = False) -> None:
    """Refuse the name of a model that neither timm nor torchvision has, without making it."""
    if name.startswith("torchvision:"):
        _check_torchvision(name.removeprefix("torchvision:"), per_pixel=per_pixel)
    elif not (name in OWN_MODELS or is_function(name) or name.startswith("smp:")):
        _check_timm(name)


def _check_timm(name: str) -> None:
    with large_import():
        import timm

    if name.endswith(".py"):
        raise InputError(f"--model {name} names a file; say which function: {name}:FUNCTION")
    if not timm.is_model(name):
        known = timm.list_models() + timm.list_pretrained()
        raise InputError(
            f"unknown model '{name}'{nearest(name, [*known, *OWN_MODELS])} "
            "(timm names as they are; torchvision:NAME; FILE.py:FUNCTION)"
        )


def _check_torchvision(name: str, *, per_pixel: bool) -> None:
    with large_import():
        import torchvision.models
    from torchvision.models import get_model_weights, list_models

    name, _, tag = name.partition(".")
    module = torchvision.models.segmentation if per_pixel else torchvision.models
    kind = "segmentation model" if per_pixel else "classifier"
    known = {f"torchvision:{n}" for n in list_models(module=module)}
    if f"torchvision:{name}" not in known:
        hint = nearest(f"torchvision:{name}", known)
        raise InputError(f"unknown model 'torchvision:{name}'{hint} (a {kind} of torchvision)")
    offered = get_model_weights(name).__members__
    if tag and tag not in offered:
        raise InputError(
            f"torchvision:{name} has no weights {tag!r}{nearest(tag, offered)} ({', '.join(offered)})"
        )


def _without_effect(drop_path: float, name: str) -> str:
    return f"drop_path = {drop_path:g} has no effect: {name} has no stochastic depth; leave it out"


def _drops_paths(module: nn.Module) -> bool:
    """An active stochastic-depth layer of timm or torchvision."""
    kind = {"DropPath": "drop_prob", "StochasticDepth": "p"}.get(type(module).__name__)
    return kind is not None and bool(getattr(module, kind, 0))


def _build(
    name: str,
    num_classes: int,
    channels: int,
    image_size: int,
    pretrained: bool,
    drop_path: float,
) -> nn.Module:
    if name in OWN_MODELS:
        recipe, kind, more = OWN_MODELS[name]
        module = importlib.import_module(f"flambeau.recipes.models.{recipe}")
        own: nn.Module = getattr(module, kind)(channels, num_classes, **more)
        return own
    if name.startswith("torchvision:"):
        known = name.removeprefix("torchvision:")
        return _torchvision(known, num_classes, channels, pretrained, drop_path)
    if is_function(name):
        return build_from_file(
            name,
            what="--model",
            num_classes=num_classes,
            channels=channels,
            image_size=image_size,
        )
    return _timm(name, channels, image_size, pretrained, drop_path, num_classes=num_classes)


def _build_per_pixel(
    name: str,
    num_classes: int,
    channels: int,
    image_size: int,
    pretrained: bool,
    drop_path: float,
) -> nn.Module:
    """A model with logits for each pixel."""
    if name in OWN_MODELS:
        raise InputError(
            f"{name} classifies whole images\n"
            "For masks name an encoder of timm (resnet18), torchvision:fcn_resnet50, smp:Unet/resnet34 or "
            "FILE.py:FUNCTION, or leave --model out"
        )
    if name.startswith("smp:"):
        return _smp(name, num_classes, channels, pretrained)
    if name.startswith("torchvision:"):
        known = name.removeprefix("torchvision:")
        return _torchvision(known, num_classes, channels, pretrained, drop_path, per_pixel=True)
    if is_function(name):
        return _build(name, num_classes, channels, image_size, pretrained, drop_path)
    encoder = _timm(name, channels, image_size, pretrained, drop_path, features_only=True)
    return PyramidSegmenter(encoder, num_classes, image_size=image_size)


def _smp(name: str, num_classes: int, channels: int, pretrained: bool) -> nn.Module:
    """A network of segmentation_models_pytorch: 'smp:Unet' or 'smp:Unet/resnet34'."""
    smp = extra("segmentation_models_pytorch", what=f"--model {name}")
    kind, _, encoder = name.removeprefix("smp:").partition("/")
    try:
        model = smp.create_model(
            kind,
            encoder_name=encoder or "resnet34",
            encoder_weights="imagenet" if pretrained else None,
            in_channels=channels,
            classes=num_classes,
        )
    except (KeyError, ValueError, TypeError, OSError, RuntimeError) as error:
        raise InputError(
            f"segmentation_models_pytorch cannot make '{name}': {first_line(error)}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def input_channels(name: str, *, grey: bool) -> int:
    """How many channels grey or color images should have: torchvision's models are made for three."""
    return 1 if grey and not name.startswith("torchvision:") else 3


def pretrained_normalization(name: str, *, channels: int) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel, in [0, 1], of the published weights; None if not known.

    They are of color: grey or other channels have their own.
    """
    if channels not in COLORS:
        return None
    if name.startswith("torchvision:") and channels == 1:
        mean, std = IMAGENET
        return [sum(mean) / 3], [sum(std) / 3]
    if name.startswith("torchvision:"):
        return IMAGENET  # in all of its presets
    import timm

    published = timm.get_pretrained_cfg(name)
    if published is None:
        return None
    mean, std = list(published.mean), list(published.std)
    if channels == 1:  # timm then sums the filters over the channels: one mean for all
        mean, std = [sum(mean) / len(mean)], [sum(std) / len(std)]
    return mean, std


def _timm(
    name: str, channels: int, image_size: int, pretrained: bool, drop_path: float, **more: Any
) -> nn.Module:
    _check_timm(name)
    import timm

    default = timm.get_pretrained_cfg(name)
    if default is not None and default.fixed_input_size:
        more["img_size"] = image_size
    if drop_path:
        more["drop_path_rate"] = drop_path
    try:
        with _cache_alone_without_network() if pretrained else contextlib.nullcontext():
            model = timm.create_model(name, pretrained=pretrained, in_chans=channels, **more)
    except Exception as error:
        if drop_path and "drop_path_rate" in str(error):
            raise InputError(_without_effect(drop_path, name)) from error
        if pretrained:
            raise InputError(
                f"the published weights of '{name}' are not available: {first_line(error).split('. ')[0]}; "
                "check the connection, or leave --pretrained out"
            ) from error
        raise InputError(
            f"timm cannot make '{name}' for {channels} channels at {image_size} pixels: {first_line(error)}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


@contextlib.contextmanager
def _cache_alone_without_network() -> Iterator[None]:
    """If the Hub's name cannot be resolved, let its client use only its cache: it would try for a minute."""
    from huggingface_hub import constants  # timm's own dependency
    from huggingface_hub.errors import LocalEntryNotFoundError

    before = constants.HF_HUB_OFFLINE
    host = urlsplit(constants.ENDPOINT).hostname
    # A proxy resolves the name itself.
    if not before and not getproxies():
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    except LocalEntryNotFoundError as error:
        if before == constants.HF_HUB_OFFLINE:
            raise
        raise ConnectionError(f"they are not in the cache, and {host} cannot be reached") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _torchvision(
    name: str,
    num_classes: int,
    channels: int,
    pretrained: bool,
    drop_path: float,
    *,
    per_pixel: bool = False,
) -> nn.Module:
    _check_torchvision(name, per_pixel=per_pixel)
    from torchvision.models import get_model, get_model_weights

    name, _, tag = name.partition(".")
    more: dict[str, Any] = {}
    if per_pixel:
        more = {"weights": None, "weights_backbone": None}
    if name in ("googlenet", "inception_v3"):
        # Without the auxiliary classifiers, whose logits training would also return. Their published weights
        # expect another normalization of color images, which transform_input applies.
        adapts = pretrained and channels == 3
        more = {"aux_logits": False, "init_weights": True, "transform_input": adapts}
    if drop_path:
        more["stochastic_depth_prob"] = drop_path
    try:
        model = get_model(name, num_classes=num_classes, **more)
    except TypeError as error:
        if not drop_path:
            raise
        raise InputError(_without_effect(drop_path, f"torchvision:{name}")) from error
    assert isinstance(model, nn.Module)
    if pretrained:
        offered = get_model_weights(name).__members__
        _load_published(model, f"torchvision:{name}", offered.get(tag or "DEFAULT"))
    if channels != 3:
        _replace_first_layer(model, channels, pretrained=pretrained)
    return MainOutput(model) if per_pixel else model


def _replace_first_layer(model: nn.Module, channels: int, *, pretrained: bool) -> None:
    """Replace the first convolution of a model for color by one for other channels.

    Source: timm, `adapt_input_conv`, for trained weights: their sum over the colors for one channel; else the
    colors one after the other, again and again, times 3 / channels, so that the sums keep their size. Random
    weights are drawn anew, with a deviation that keeps it, too.
    """
    name, old = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    assert old.in_channels == 3
    assert isinstance(old.padding, tuple)
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]  # of two numbers
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    with torch.no_grad():
        if not pretrained:
            new.weight.normal_(std=float(old.weight.std()) * math.sqrt(3 / channels))
        elif channels == 1:
            new.weight.copy_(old.weight.sum(1, keepdim=True))
        else:
            times = -(-channels // 3)
            new.weight.copy_(old.weight.repeat(1, times, 1, 1)[:, :channels] * (3 / channels))
        if new.bias is not None and old.bias is not None:
            new.bias.copy_(old.bias)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, new)


def _load_published(model: nn.Module, name: str, published: Any) -> None:
    """Load torchvision's weights, except a head of another shape."""
    try:
        weights = published.get_state_dict(check_hash=True)
    except (OSError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"the published weights of '{name}' are not available: {first_line(error)}; "
            "check the connection, or leave --pretrained out"
        ) from error
    current = model.state_dict()
    fitting = {k: v for k, v in weights.items() if k in current and current[k].shape == v.shape}
    model.load_state_dict(fitting, strict=False)


def check_output(
    model: nn.Module,
    *,
    num_classes: int,
    channels: int,
    image_size: int,
    per_pixel: bool = False,
    num_images: int = 1,
    training: bool = False,
) -> None:
    """Run black images through a model, to find errors before the first step.

    InputError: as of `check_logits`, or nothing can be trained.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("the model has no parameter that can be trained")
    check_logits(
        model,
        num_classes=num_classes,
        channels=channels,
        image_size=image_size,
        per_pixel=per_pixel,
        num_images=num_images,
        training=training,
    )


def check_logits(
    model: nn.Module,
    *,
    num_classes: int,
    channels: int,
    image_size: int,
    per_pixel: bool = False,
    num_images: int = 1,
    training: bool = False,
) -> None:
    """Run black images through a model, in evaluation mode unless `training` keeps the modes.

    InputError: the forward pass fails, or logits are not (N, num_classes), or of each pixel.
    """
    images_shape = (num_images, channels, image_size, image_size)
    logits = try_forward(model, images_shape, training=training)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    sides = (image_size, image_size) if per_pixel else ()
    if shape != (num_images, num_classes, *sides):
        wanted = ", ".join(map(str, (num_classes, *sides)))
        raise InputError(
            f"the model must give logits of shape (N, {wanted}); "
            f"{_on(images_shape, training=training)} it gives {shape}"
        )


def try_forward(
    model: nn.Module, shape: tuple[int, int, int, int], *, training: bool = False
) -> Any:
    """The output for black images (N, C, H, W); buffers and modes do not change."""
    try:
        # Not inference_mode: a model may cache tensors that training then needs gradients through.
        with kept_as_is(model), torch.no_grad():
            if not training:
                model.eval()
            device = next((p.device for p in model.parameters()), None)
            return model(torch.zeros(shape, device=device))
    except Exception as error:
        raise InputError(
            f"the model fails {_on(shape, training=training)}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _on(shape: tuple[int, ...], *, training: bool) -> str:
    return f"{'in training ' if training else ''}on {' x '.join(map(str, shape))}"


@contextlib.contextmanager
def kept_as_is(model: nn.Module) -> Iterator[None]:
    """Restore the modes of all modules and their buffers at the end."""
    modes = [(module, module.training) for module in model.modules()]
    # By place, too: a forward pass may put another tensor in the place of a buffer.
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffers, before in places:
            buffers.clear()
            buffers.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def make_model(
    settings: ResolvedSettings,
    facts: DataFacts,
    *,
    pretrained: bool = False,
    any_output: bool = False,
) -> nn.Module:
    """The model of a run on its device, in channels_last.

    With `any_output` it need not classify the data.
    """
    shape = shape_of(settings, facts)
    model = build_model(
        settings.model, pretrained=pretrained, drop_path=settings.drop_path, **shape
    )
    if any_output:
        try_forward(model, (1, facts.channels, settings.image_size, settings.image_size))
    else:
        check_output(model, **shape)
    return model.to(pick_device(settings.device), memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def normalizer(facts: DataFacts, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from images (N, C, H, W) to normalized float32 ones, on the device.

    Images are uint8, or float32 in the unit of the mean.
    """
    unit_mean = torch.tensor(facts.mean, device=device).view(1, -1, 1, 1)
    unit_std = torch.tensor(facts.std, device=device).view(1, -1, 1, 1)
    mean = unit_mean * 255
    std = unit_std * 255

    def normalize(images: Tensor) -> Tensor:
        if images.dtype == torch.float32:
            images = images.sub(unit_mean).div_(unit_std)
            return images.contiguous(memory_format=torch.channels_last)
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)

    return normalize


def check_training(
    model: nn.Module, settings: ResolvedSettings, facts: DataFacts, *, world: int = 1
) -> None:
    """Refuse a model that cannot train, also on a smallest batch of one image."""
    num_images = facts.train_samples
    accumulate = settings.accumulate
    lone = num_images % (settings.batch_size * accumulate) == 1
    lone = lone or settings.batch_size < 2 * (1 if settings.sync_bn else world)
    try:
        check_output(model, **shape_of(settings, facts), num_images=2 - lone, training=True)
    except InputError as error:
        if not lone or not isinstance(error.__cause__, ValueError):
            raise
        sizes = itertools.count(2 * world)
        good = next(size for size in sizes if num_images % (size * accumulate) != 1)
        raise InputError(
            f"batch_size = {settings.batch_size} leaves a batch of one image{' per process' * (world > 1)}, "
            f"on which this model cannot train: {error.__cause__}\n"
            f"Use another one, such as --batch-size {good}"
        ) from error
    for name in ("eval_size", "start_size"):
        size = getattr(settings, name)
        if size is None:
            continue
        try:
            check_output(model, **{**shape_of(settings, facts), "image_size": size})
        except InputError as error:
            raise InputError(f"{settings.model} cannot take {name} = {size}: {error}") from error


def shape_of(settings: ResolvedSettings, facts: DataFacts) -> dict[str, Any]:
    return {
        "num_classes": facts.task.num_outputs,
        "channels": facts.channels,
        "image_size": settings.image_size,
        "per_pixel": facts.task.per_pixel,
    }
