"""One module from pixels to predictions: what is exported.

N: images, C: channels, H, W: height and width as decoded, S: side of the images as the network sees them,
K: classes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.exports.resize_in_graph import ResizedCentre
from flambeau.trainer.prediction.ensemble import Ensemble, Model, joint_function
from flambeau.trainer.prediction.trained_model import Trained


class ServedModel(nn.Module):
    """Resizing, normalization, network and the answer from its outputs, on the CPU.

    Args:
        network: (N, C, S, S) float to (N, K) logits, or (N, K, S, S), in evaluation mode.
        answer_name: of the second output.
        origin: 'mean' and 'std' per channel, of pixels in [0, 1], or of levels of 16 bits or other numbers;
            'pixels', 'uint8', or another `PixelKind`, whose numbers are float32; 'size', S; 'interpolation';
            'resize', of `EvalResize`; and the arguments of `build_model`.
    """

    def __init__(
        self,
        network: nn.Module,
        answer: Callable[[Tensor, Tensor], Tensor],
        origin: Mapping[str, Any],
        *,
        answer_name: str = "probabilities",
    ) -> None:
        super().__init__()
        self.answer = answer
        self.answer_name = answer_name
        self.origin = origin
        mean = origin["mean"]
        std = origin["std"]
        self.resize = ResizedCentre(origin["size"], origin["interpolation"], origin.get("resize"))
        self.network = network
        self.channels = len(mean)
        self.temperature = float(origin.get("temperature", 1.0))  # none in earlier files
        is_wide = origin.get("pixels", "uint8") != "uint8"  # files of version 0.1 have no such key
        self.dtype = torch.float32 if is_wide else torch.uint8
        # The same products as `normalizer` computes, once.
        scale = 1 if is_wide else 255
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1) * scale)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1) * scale)
        self.eval()

    def forward(self, pixels: Tensor, full_size: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and answer, for pixels (N, H, W, C) of one size; see `ResizedCentre`.

        Logits and probabilities (N, K) float32 for classes, logits (N, K, S, S) and a mask (N, H, W) uint8
        for pixels.
        """
        x = (self.resize(pixels, full_size) - self.mean) / self.std
        dtype = next((p.dtype for p in self.network.parameters()), torch.float32)
        logits = self.network(x.to(dtype)).float()
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits, self.answer(logits, pixels)

    def with_network(self, network: nn.Module) -> "ServedModel":
        """A copy around another network with the same inputs and outputs."""
        other = copy.deepcopy(self)
        other.network = network.eval()
        return other

    def changed(self, change: Callable[[nn.Module], nn.Module]) -> "ServedModel":
        """A copy with what a function makes of the network."""
        return self.with_network(change(self.network))


class ServedEnsemble(ServedModel):
    """Networks that share pixels and resizing; each has a normalization, an origin, of its own.

    `joint` makes one output of those of all networks.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        joint: Callable[[Sequence[Tensor]], Tensor],
        answer: Callable[[Tensor, Tensor], Tensor],
        origins: Sequence[Mapping[str, Any]],
        *,
        answer_name: str,
    ) -> None:
        super().__init__(nn.ModuleList(networks), answer, origins[0], answer_name=answer_name)
        self.joint = joint
        self.temperatures = [float(one.get("temperature", 1.0)) for one in origins]
        scale = 1 if self.dtype == torch.float32 else 255
        for name in ("mean", "std"):
            each = [torch.tensor(one[name]).view(1, -1, 1, 1) * scale for one in origins]
            self.register_buffer(f"each_{name}", torch.stack(each))

    def forward(self, pixels: Tensor, full_size: Tensor) -> tuple[Tensor, Tensor]:
        """As `ServedModel.forward`, of all networks together."""
        resized = self.resize(pixels, full_size)
        assert isinstance(self.network, nn.ModuleList)
        means = self.get_buffer("each_mean")
        stds = self.get_buffer("each_std")
        outputs = []
        for number, network in enumerate(self.network):
            x = (resized - means[number]) / stds[number]
            dtype = next((p.dtype for p in network.parameters()), torch.float32)
            logits = network(x.to(dtype)).float()
            temperature = self.temperatures[number]
            outputs.append(logits if temperature == 1 else logits / temperature)
        logits = self.joint(outputs)
        return logits, self.answer(logits, pixels)

    def changed(self, change: Callable[[nn.Module], nn.Module]) -> ServedModel:
        """A copy with what a function makes of each network."""
        assert isinstance(self.network, nn.ModuleList)
        return self.with_network(nn.ModuleList(change(one) for one in self.network))


def served(model: Model) -> ServedModel:
    """A copy of a run's model, or an ensemble's, from pixels to predictions."""
    if isinstance(model, Trained):
        return _served(model)
    task = model.facts.task
    each = [_served(one) for one in model.members]
    return ServedEnsemble(
        [one.network for one in each],
        joint_function(model),
        task.graph_answer,
        [one.origin for one in each],
        answer_name=task.export_words.answer,
    )


def why_not_one_graph(ensemble: Ensemble) -> str | None:
    """Why the members of an ensemble cannot share a graph; None if they can."""
    for name, one in zip(ensemble.names, ensemble.members, strict=True):
        if one.has_fixed_size:
            return f"{name} is an export already: name its run"
        if one.settings.qat:
            return f"{name} was trained with --qat, whose integers are those of one network"
    if len(ensemble.viewers) == 1:
        return None
    names = [ensemble.names[ensemble.view_of.index(number)] for number in (0, 1)]
    kinds = [
        f"{name} takes {one.facts.channels} channels of {one.image_size} x {one.image_size} "
        f"({one.settings.crop}, {one.resize or 'cropped'}, {one.facts.pixels})"
        for name, one in zip(names, ensemble.viewers, strict=False)
    ]
    return f"{kinds[0]}, and {kinds[1]}"


def _served(trained: Trained) -> ServedModel:
    facts = trained.facts
    origin = {
        "model": trained.settings.model,
        "num_classes": facts.task.num_outputs,
        "image_size": trained.settings.image_size,
        "per_pixel": facts.task.per_pixel,
        "mean": facts.mean,
        "std": facts.std,
        "pixels": facts.pixels,
        "size": trained.image_size,
        "interpolation": trained.settings.crop,
        "resize": trained.resize,
    }
    if trained.calibration is not None:
        origin["temperature"] = trained.calibration.temperature
    network = copy.deepcopy(trained.model).cpu().float().eval()
    task = facts.task
    return ServedModel(network, task.graph_answer, origin, answer_name=task.export_words.answer)
