"""Unstructured pruning: the smallest weights become 0 and stay 0 while the rest trains on.

非结构化剪枝：最小的权重变为 0，在其余权重继续训练时保持为 0。

Source: Zhu and Gupta, "To prune, or not to prune", 2017 (arXiv:1710.01878), section 3, for the schedule;
Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015
(arXiv:1506.02626); Mishra et al., "Accelerating sparse deep neural networks", 2021 (arXiv:2104.08378), for 2
of 4.

Not for speed by itself: dense kernels multiply zeros too. What gets faster is 2 of 4 on GPUs that have it,
and what gets smaller is a compressed file; smaller layers are what `prune_channels` beside this file makes.
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
    """The part of the weights that is 0 at a step: many go early, when many do not matter; few go late.

    Equation 1 of Zhu and Gupta: final + (initial - final) * (1 - progress)^3.

    Args:
        step: counted in optimizer steps from 0.
        final, initial: parts in [0, 1).
        first_step, last_step: between which the part grows.

    Returns:
        A part: `initial` before `first_step`, `final` from `last_step` on.

    Raises:
        ValueError: a part out of range, or no step between the two.

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
    """Which weights of a model are 0, and keeps them so.

    The weights themselves are set to 0, so the model, its names and its state_dict stay plain at every
    moment: a checkpoint loads into a model that knows nothing of this. After each optimizer step `apply` sets
    them to 0 again, because momentum would move them; `attach` does that by itself.

    Args:
        model: whose parameters are changed in place.
        names: of the parameters to prune; by default the weights of convolutions and linear layers.

    Raises:
        ValueError: no such parameter, or none at all.

    Example:
        >>> model = nn.Linear(4, 2, bias=False)
        >>> masks = WeightMasks(model)
        >>> masks.prune(0.75)
        >>> int(model.weight.count_nonzero()), masks.sparsity
        (2, 0.75)
    """

    def __init__(self, model: nn.Module, *, names: Iterable[str] | None = None) -> None:
        parameters = dict(model.named_parameters())
        if names is None:
            layers = [name for name, m in model.named_modules() if isinstance(m, _LAYERS)]
            found = [f"{name}.weight" if name else "weight" for name in layers]
            names = [name for name in found if name in parameters]
        else:
            names = list(names)
        if missing := [name for name in names if name not in parameters]:
            raise ValueError(f"the model has no parameter {', '.join(missing)}")
        if not names:
            raise ValueError("the model has no weights of convolutions or linear layers")
        self._weights = {name: parameters[name] for name in names}
        self._layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        self.masks = {
            name: torch.ones_like(w, dtype=torch.bool) for name, w in self._weights.items()
        }

    @property
    def sparsity(self) -> float:
        """The part of the weights, over all layers, that is kept at 0."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / sum(mask.numel() for mask in self.masks.values())

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Set the smallest weights of all layers together to 0; those that are 0 by now stay among them.

        Args:
            sparsity: the part that is 0 afterwards, in [0, 1); nothing comes back where it is less than now.

        Raises:
            ValueError: out of range.
        """
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
        sizes = [
            torch.where(self.masks[name], weight.detach().abs().float(), -1.0).flatten()
            for name, weight in self._weights.items()
        ]
        everything = torch.cat([size.to(sizes[0].device) for size in sizes])
        gone = everything.topk(round(sparsity * len(everything)), largest=False).indices
        keep = (everything >= 0).index_fill(0, gone, False)
        parts = keep.split([len(size) for size in sizes])
        for (name, weight), part in zip(self._weights.items(), parts, strict=True):
            self.masks[name] = part.view(weight.shape).to(weight.device)
        self.apply()

    @torch.no_grad()
    def prune_pattern(self, kept: int = 2, of: int = 4) -> list[str]:
        """Of each `of` weights in a row over the input channels, keep the `kept` largest.

        What is pruned by now stays 0, also where a row then keeps fewer.

        Returns:
            Names of the parameters that have the pattern now; the rest has a number of inputs (per group)
            that `of` does not divide, or fewer than two dimensions.

        Raises:
            ValueError: not 0 < kept < of.
        """
        if not 0 < kept < of:
            raise ValueError(f"some of the weights stay and some go, got {kept} of {of}")
        names = []
        for name, weight in self._weights.items():
            layer = self._layers[name]
            # The inputs of a transposed convolution are dimension 0, those of all its groups.
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
        """Set to 0 what is to be 0: after each optimizer step."""
        for name, weight in self._weights.items():
            weight.masked_fill_(~self.masks[name], 0)  # also where it is infinite or NaN

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Apply after every step of this optimizer.

        Returns:
            A handle, whose `remove()` ends it.
        """
        return optimizer.register_step_post_hook(lambda *_: self.apply())

    def state_dict(self) -> dict[str, Tensor]:
        """The masks by name, True where a weight trains."""
        return dict(self.masks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the masks of a checkpoint, and apply them.

        Raises:
            ValueError: masks of other parameters or shapes.
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
