"""An exponential moving average of a model's weights, kept on the device.

模型权重的指数移动平均，始终保存在设备上。

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the warm-up of
the decay is that of TensorFlow's tf.train.ExponentialMovingAverage (`num_updates`).

Not for sharded parameters (FSDP): average the shards there.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


class EMA:
    """Averages a model's floating-point parameters and persistent buffers; copies other buffers.

    Update t, from 0, is `shadow = d * shadow + (1 - d) * model` with d = `decay`, or with `warmup` d =
    min(decay, (1 + t) / (10 + t)), which soon forgets the first weights. Update after the optimizer step. A
    half-precision tensor has a float32 shadow, because bfloat16 rounds away changes below one part in 256.

    Args:
        model: on its final device, without wrapper (`ddp.module`).
        decay: in (0, 1); 0.999 averages about the last 1000 updates.

    Raises:
        ValueError: decay out of range, or `state_dict()` has more than parameters and buffers.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 0.0)
        >>> ema = EMA(model, decay=0.5, warmup=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> ema.update()
        >>> ema.shadow["weight"].item()
        0.5
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool = True) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay must be in (0, 1), got {decay}")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        self.shadow: dict[str, Tensor] = {}
        """The average, with the names of `model.state_dict()`; tied names share one tensor."""
        # Each tensor as (the dict of its module, its name in the dict), because `model.to()` and some forward
        # passes replace a buffer by a new tensor.
        self._averaged: list[tuple[dict[str, Any], str]] = []
        self._copied: list[tuple[dict[str, Any], str]] = []
        self._shadow_averaged: list[Tensor] = []
        self._shadow_copied: list[Tensor] = []
        self._is_applied = False
        self._collect(model)
        self._widens = any(holder[name].dtype in _HALF for holder, name in self._averaged)

    def _collect(self, model: nn.Module) -> None:
        slots = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                slots.update({f"{prefix}.{name}".lstrip("."): (holder, name) for name in holder})
        known: dict[int, Tensor] = {}
        for key in model.state_dict():
            if key not in slots:
                raise ValueError(
                    f"state_dict() has {key!r}, which is neither a parameter nor a buffer, "
                    "so it cannot be averaged: leave it out of the state dict"
                )
            holder, name = slots[key]
            live: Tensor = holder[name]
            if id(live) not in known:
                known[id(live)] = self._shadow_of(live, slots[key])
            self.shadow[key] = known[id(live)]

    def _shadow_of(self, live: Tensor, slot: tuple[dict[str, Any], str]) -> Tensor:
        shadow = live.detach().clone()
        if live.is_floating_point() or live.is_complex():
            shadow = shadow.float() if live.dtype in _HALF else shadow
            self._averaged.append(slot)
            self._shadow_averaged.append(shadow)
        else:
            self._copied.append(slot)
            self._shadow_copied.append(shadow)
        return shadow

    def update(self) -> None:
        """Update the average with the model's present weights.

        Raises:
            RuntimeError: called inside `applied()`, when the model holds the average.

        Example:
            >>> model = nn.BatchNorm1d(2)
            >>> ema = EMA(model, decay=0.9)
            >>> ema.update()
            >>> ema.num_updates
            1
        """
        if self._is_applied:
            raise RuntimeError(
                "update() inside applied() would average the average: leave it first"
            )
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        live = [holder[name] for holder, name in self._averaged]
        with torch.no_grad():
            if self._widens:
                live = [t.float() if t.dtype in _HALF else t for t in live]
            torch._foreach_lerp_(self._shadow_averaged, live, 1.0 - decay)
            if self._copied:
                live = [holder[name] for holder, name in self._copied]
                torch._foreach_copy_(self._shadow_copied, live)
        self.num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for the `with` block, and restore the bits after it.

        Weights changed inside the block are restored too. It costs a copy of the model on its device.

        Raises:
            RuntimeError: called inside another `applied()`.

        Example:
            >>> model = nn.Linear(1, 1)
            >>> ema = EMA(model, decay=0.9)
            >>> with ema.applied():
            ...     output = model(torch.ones(1))
        """
        if self._is_applied:
            raise RuntimeError("applied() is active already: leave it first")
        slots = self._averaged + self._copied
        live = [holder[name] for holder, name in slots]
        with torch.no_grad():
            backup = [t.clone() for t in live]
        self._is_applied = True
        try:
            with torch.no_grad():
                torch._foreach_copy_(live, self._shadow_averaged + self._shadow_copied)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, backup)
            for (holder, name), tensor in zip(slots, live, strict=True):
                holder[name] = tensor
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """The average (the tensors, not copies) and the number of updates.

        Example:
            >>> sorted(EMA(nn.Linear(1, 1), decay=0.9).state_dict())
            ['num_updates', 'shadow']
        """
        return {"num_updates": self.num_updates, "shadow": dict(self.shadow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, which does not contain `decay` and `warmup`.

        Args:
            state: tensors may be on another device.

        Raises:
            ValueError: names or shapes differ from this model's; nothing is changed.

        Example:
            >>> ema = EMA(nn.Linear(1, 1), decay=0.9)
            >>> ema.load_state_dict(ema.state_dict())
        """
        shadow: Mapping[str, Tensor] = state["shadow"]
        if different := sorted(shadow.keys() ^ self.shadow.keys()):
            raise ValueError(f"the state is of another model: only one of the two has {different}")
        for name, value in shadow.items():
            if value.shape != self.shadow[name].shape:
                raise ValueError(
                    f"the state is of another model: {name} has the shape {tuple(value.shape)} in it, "
                    f"{tuple(self.shadow[name].shape)} here"
                )
        with torch.no_grad():
            for name, value in shadow.items():
                self.shadow[name].copy_(value)
        self.num_updates = int(state["num_updates"])
