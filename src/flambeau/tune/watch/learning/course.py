"""How layers are made and normalize, how losses are reduced, what is shuffled, each with its line."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flambeau.tune.watch.learning.measures import is_plain, made_by
from flambeau.tune.watch.learning.notes import Notes, line_here
from flambeau.tune.watch.stack_phases import CodeLocation, user_lines

_EVALUATION = "val", "eval", "test"
_LOSSES = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.CrossEntropyLoss, nn.NLLLoss
_BINARY_LOSSES = nn.BCELoss, nn.BCEWithLogitsLoss
_RANDOM_LAYERS = _BatchNorm, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d
_SATURATED = 0.49  # distance of a sigmoid from its middle; chosen


class CourseWatch:
    """Wraps what makes layers, permutations and schedules, and hooks the layers whose values tell."""

    def __init__(self, notes: Notes, is_open: Callable[[], bool]) -> None:
        self._notes, self._is_open = notes, is_open
        self._made: weakref.WeakKeyDictionary[nn.Module, CodeLocation | None] = (
            weakref.WeakKeyDictionary()
        )
        self._began: dict[int, CodeLocation | None] = {}
        self._before: nn.Module | None = None
        self.schedules: dict[int, list[Any]] = {}

    def install(self) -> None:
        self._wrap(nn.Module, "__init__", self._note_made)
        self._wrap(LRScheduler, "__init__", self._note_schedule)
        self._wrap(torch, "randperm", self._note_permutation)
        for name in ("normal_", "uniform_", "constant_", "zeros_", "ones_", "trunc_normal_"):
            self._wrap(nn.init, name, self._note_beginning)
        gather = Tensor.gather

        @functools.wraps(gather)
        def gathered(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = gather(tensor, *args, **kwargs)
            if (
                self._is_open()
                and result.requires_grad
                and made_by(tensor).startswith("LogSoftmax")
            ):
                result.register_hook(functools.partial(self._note_sign, line_here()))
            return result

        Tensor.gather = gathered  # type: ignore[method-assign,assignment]
        register_module_forward_hook(self._after)

    def made_at(self, module: nn.Module) -> CodeLocation | None:
        return self._made.get(module)

    @staticmethod
    def _wrap(owner: Any, name: str, note: Callable[..., None]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            note(*args)
            return result

        setattr(owner, name, call)

    # ------------------------------------------------------------ notes

    def _note_made(self, module: nn.Module, *_: Any) -> None:
        self._made.setdefault(module, line_here(3))

    def _note_schedule(self, _: LRScheduler, optimizer: Optimizer | None = None, *__: Any) -> None:
        where = line_here(3)
        if where is not None and optimizer is not None:
            self.schedules.setdefault(id(optimizer), [where.file, where.line])

    def _note_permutation(self, n: Any = None, *_: Any) -> None:
        if isinstance(n, int):
            where = line_here(3)
            function = where.function if where else ""
            self._notes.add("permutation", where, n=n, function=function)

    def _note_beginning(self, tensor: Tensor, *_: Any) -> None:
        self._began[id(tensor)] = line_here(3)

    def _note_sign(self, where: CodeLocation | None, gradient: Tensor) -> None:
        if self._is_open():
            is_up = bool((gradient >= 0).all()) and bool((gradient > 0).any())
            self._notes.add("sign of log-probabilities", where, up=is_up)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not is_plain(output):
            return
        if not torch.is_grad_enabled():
            self._note_evaluation(module)
        elif self._is_open():
            with torch.no_grad():
                self._note_layer(module, args, output)
        self._before = module

    def _note_evaluation(self, module: nn.Module) -> None:
        """A layer in train mode, without gradients, in a function that evaluates by its name."""
        if not (module.training and isinstance(module, _RANDOM_LAYERS)):
            return
        lines = user_lines(sys._getframe(2))
        names = [one.function.lower() for one in lines]
        if any(word in name for word in _EVALUATION for name in names):
            at = next((one for one in lines if one.function != "forward"), None)
            self._notes.add("evaluation by name", at, layer=type(module).__name__)

    def _note_layer(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(module, _BatchNorm) and module.training and output.ndim > 1:
            where = self.made_at(module)
            values = output.numel() // output.shape[1]
            momentum = module.momentum if module.track_running_stats else None
            self._notes.add("batch norm", where, values=values, momentum=momentum)
        elif isinstance(module, nn.Sigmoid | nn.Tanh) and isinstance(self._before, nn.Linear):
            middle = 0.5 if isinstance(module, nn.Sigmoid) else 0.0
            reach = _SATURATED if isinstance(module, nn.Sigmoid) else 2 * _SATURATED
            share = float(((output - middle).abs() > reach).float().mean())
            where = self._began.get(id(self._before.weight)) or self.made_at(self._before)
            name = type(module).__name__
            self._notes.add("saturation", where, share=share, name=name, width=output.shape[-1])
        elif isinstance(module, _LOSSES + _BINARY_LOSSES) and module.reduction == "sum" and args:
            self._notes.add("summed loss", line_here(4), n=len(args[0]))
