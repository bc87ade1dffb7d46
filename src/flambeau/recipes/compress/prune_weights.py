"""Unstructured pruning: the smallest weights become 0 and stay 0 while the others keep training.

非结构化剪枝：最小的权重变为 0，在其余权重继续训练时保持为 0。

Source: Zhu and Gupta, "To prune, or not to prune", 2017 (arXiv:1710.01878), section 3, for the schedule;
Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015
(arXiv:1506.02626); Mishra et al., "Accelerating sparse deep neural networks", 2021 (arXiv:2104.08378), for 2
of 4.

Not for speed by itself: dense kernels multiply zeros too. Only the 2-of-4 pattern is faster, on GPUs that
support it, and compressed files get smaller. To make layers smaller, see the recipe `prune_channels`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)


def cubic_sparsity(
    step: int, *, final: float, first_step: int, last_step: int, initial: float = 0.0
) -> float:
    """The fraction of weights that is 0 at a step; it grows fast at first and slowly later.

    Equation 1 of Zhu and Gupta: final + (initial - final) * (1 - progress)^3.

    Args:
        step: optimizer steps already made, from 0.
        final, initial: fractions in [0, 1).
        first_step, last_step: the fraction grows between these steps.

    Returns:
        The fraction: `initial` before `first_step`, `final` from `last_step` on.

    Raises:
        ValueError: a fraction is out of range, or `first_step` is not before `last_step`.

    Example:
        >>> [round(cubic_sparsity(s, final=0.8, first_step=0, last_step=4), 3) for s in range(6)]
        [0.0, 0.463, 0.7, 0.788, 0.8, 0.8]
    """
    if not (0 <= initial < 1 and 0 <= final < 1):
        raise ValueError(f"parts are in [0, 1), got {initial} and {final}")
    if first_step >= last_step:
        raise ValueError(f"first_step is before last_step, got {first_step} and {last_step}")
    progress = min(1.0, max(0.0, (step - first_step) / (last_step - first_step)))
    return final + (initial - final) * (1 - progress) ** 3


class WeightMasks:
    """Masks of the pruned weights of a model, which are kept at 0.

    The weights themselves are set to 0, so the model, its names and its state_dict stay ordinary, and a
    checkpoint loads into any model without masks. After each optimizer step `apply` sets pruned weights to 0
    again, because momentum would change them; `attach` makes the optimizer call it.

    Args:
        model: its parameters are changed in place.
        names: of the parameters to prune; by default the weights of convolutions and linear layers.

    Raises:
        ValueError: a name is not a parameter's, there are none, or (without `names`) the weights of a layer
            are computed from others (weight_norm, spectral_norm).
        TypeError: `names` is a single string.

    Example:
        >>> model = nn.Linear(4, 2, bias=False)
        >>> masks = WeightMasks(model)
        >>> masks.prune(0.75)
        >>> int(model.weight.count_nonzero()), masks.sparsity
        (2, 0.75)
    """

    def __init__(self, model: nn.Module, *, names: Iterable[str] | None = None) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if names is None:
            layers = [name for name, m in model.named_modules() if isinstance(m, _LAYERS)]
            names = [f"{name}.weight" if name else "weight" for name in layers]
            if computed := [name for name in names if name not in parameters]:
                raise ValueError(
                    f"{', '.join(computed)} is computed from other parameters (weight_norm, spectral_norm, "
                    "pruning) and cannot stay 0: give the names of the other weights"
                )
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got one string: [{names!r}]")
        names = list(names)
        if missing := [name for name in names if name not in parameters]:
            raise ValueError(f"the model has no parameter {', '.join(missing)}")
        if not names:
            raise ValueError("the model has no weights of convolutions or linear layers")
        # Of the names of one weight the first one stays.
        once = {id(parameters[name]): name for name in reversed(names)}
        names = list(reversed(once.values()))
        self._weights = {name: parameters[name] for name in names}
        self._layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        self.masks = {
            name: torch.ones_like(w, dtype=torch.bool) for name, w in self._weights.items()
        }

    @property
    def sparsity(self) -> float:
        """The fraction of weights, over all layers, that is kept at 0."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / max(1, sum(mask.numel() for mask in self.masks.values()))

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Set the smallest weights of all layers together to 0; weights that are pruned already stay 0.

        Args:
            sparsity: the fraction that is 0 afterwards, in [0, 1); below the present one nothing changes.

        Raises:
            ValueError: out of range.
        """
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
        dtype = torch.float32
        for weight in self._weights.values():
            dtype = torch.promote_types(dtype, weight.abs().dtype)
        sizes = [
            torch.where(self.masks[name], weight.detach().abs().to(dtype), -1.0).flatten()
            for name, weight in self._weights.items()
        ]
        everything = torch.cat([size.to(sizes[0].device) for size in sizes])
        gone = everything.topk(round(sparsity * len(everything)), largest=False).indices
        keep = (everything != -1).index_fill(0, gone, False)
        parts = keep.split([len(size) for size in sizes])
        for (name, weight), part in zip(self._weights.items(), parts, strict=True):
            self.masks[name] = part.view(weight.shape).to(weight.device)
        self.apply()

    @torch.no_grad()
    def prune_pattern(self, kept: int = 2, of: int = 4) -> list[str]:
        """Of each `of` consecutive weights along the input channels, keep the `kept` largest.

        Weights that are pruned already stay 0, even if fewer than `kept` then remain.

        Returns:
            Names of the parameters that now have the pattern. The others have a number of inputs (per group)
            that `of` does not divide, or fewer than two dimensions.

        Raises:
            ValueError: not 0 < kept < of.
        """
        if not 0 < kept < of:
            raise ValueError(f"some of the weights stay and some go, got {kept} of {of}")
        names = []
        for name, weight in self._weights.items():
            layer = self._layers[name]
            # In a transposed convolution, dimension 0 is the inputs of all groups.
            axis = int(not isinstance(layer, _TRANSPOSED))
            groups = 1 if axis else int(getattr(layer, "groups", 1))
            if weight.ndim < 2 or weight.shape[axis] // groups % of:
                continue
            names.append(name)
            size = weight.detach().abs().masked_fill(~self.masks[name], -1).movedim(axis, -1)
            rows = size.reshape(-1, of)
            mask = torch.zeros_like(rows, dtype=torch.bool)
            mask.scatter_(1, rows.topk(kept, dim=1).indices, True)
            pattern = mask.view(size.shape).movedim(-1, axis)
            self.masks[name] = (pattern & self.masks[name]).contiguous()
        self.apply()
        return names

    @torch.no_grad()
    def apply(self) -> None:
        """Set the pruned weights to 0; call it after each optimizer step."""
        for name, weight in self._weights.items():
            weight.masked_fill_(~self.masks[name], 0)  # even if infinite or NaN

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Make this optimizer call `apply` after every step.

        Returns:
            A handle; its `remove()` ends this.
        """
        return optimizer.register_step_post_hook(lambda *_: self.apply())

    def state_dict(self) -> dict[str, Tensor]:
        """The masks by name, True for weights that train."""
        return dict(self.masks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the masks of a checkpoint, and apply them.

        Raises:
            ValueError: the masks have other names or shapes.
        """
        shapes = {name: tuple(mask.shape) for name, mask in self.masks.items()}
        given = {name: tuple(mask.shape) for name, mask in state.items()}
        if shapes != given:
            wrong = sorted(n for n in shapes | given if shapes.get(n) != given.get(n))
            raise ValueError(f"these masks are of another model: {', '.join(wrong)}")
        self.masks = {
            name: state[name].to(w.device, torch.bool) for name, w in self._weights.items()
        }
        self.apply()
