"""Models: which parameters run, in which mode, on what values."""

import functools
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from flambeau.tune.watch.code_origin import origin_of
from flambeau.tune.watch.learning.measures import is_plain, row_hashes, spread_of, tensors_in
from flambeau.tune.watch.learning.notes import Notes, last_line, line_here
from flambeau.tune.watch.learning.rehearsal import ModelCall, output_of
from flambeau.tune.watch.stack_phases import CodeLocation, is_torchs, user_line, user_lines

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_FIRST_LAYERS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
_DIFFERENT = 8  # numbers of a sample that is not met twice by chance; chosen
_MODES = (*_BATCH_NORMS, *_DROPOUTS)
_EVALUATION = {"val", "valid", "validate", "validation", "eval", "evaluate", "evaluation", "test"}


class _Frozen(NamedTuple):
    line: CodeLocation | None
    caller: CodeLocation | None
    at_s: float


class RootSeen:
    """A module that is called from outside of modules."""

    def __init__(self, module: nn.Module, where: CodeLocation | None) -> None:
        self.module, self.where = module, where
        self.has_modes = any(isinstance(one, _MODES) for one in module.modules())
        self.trained = 0  # calls that a backward pass followed
        self.was_in_train = False
        self.pending: bool | None = None
        self.pending_line: CodeLocation | None = None


class ModelWatch:
    """Global hooks of modules, while `is_open`."""

    def __init__(self, notes: Notes, is_open: Callable[[], bool]) -> None:
        self._notes, self._is_open = notes, is_open
        self.roots: dict[int, RootSeen] = {}
        self.ran: dict[int, tuple[Tensor, str]] = {}
        self.strangers: dict[str, list[int]] = {}
        self.stranger_lines: dict[str, CodeLocation | None] = {}
        self.firsts: list[dict[str, float]] = []
        self.first_line: CodeLocation | None = None
        self.own_line_before: CodeLocation | None = None  # of the user's layer before the first
        self.first_is_normalized: bool | None = None
        self.hashes: list[int] = []
        self.calls: list[ModelCall] = []  # the first two since the last backward pass
        self.relus: dict[int, list[float]] = {}
        self.evaluates: Callable[[], bool] = lambda: False
        self.forwarded: Callable[[list[int], Tensor | None], None] = lambda samples, ids: None
        self._stack: list[nn.Module] = []
        self._known: set[int] = set()
        self._leaf = 0
        self._kept: list[nn.Module] = []
        self._is_first_root = True
        self._last_leaf: nn.Module = nn.Identity()
        self.last_weights: set[int] = set()  # of the layers that ran last in a training call
        self._made: dict[int, tuple[weakref.ref[nn.Module], CodeLocation]] = {}
        self.initialized: dict[int, CodeLocation] = {}
        self.lines: dict[int, CodeLocation | None] = {}
        self.run_lines: dict[int, CodeLocation | None] = {}
        self.without_gradients: dict[int, CodeLocation | None] = {}
        self.last_cut: CodeLocation | None = None
        self._frozen: dict[int, _Frozen | None] = {}
        self._callers: dict[CodeLocation, set[CodeLocation | None]] = {}
        self.no_grad_line: CodeLocation | None = None
        self._judged: CodeLocation | None = None

    def install(self) -> None:
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after, always_call=True)
        self._watch_dropout()
        self._watch_softmax()
        self._watch_loading()
        self._watch_origins()
        self._watch_cuts()
        self._watch_freezing()

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with_gradients = torch.is_grad_enabled()
        self._stack.append(module)
        if len(self._stack) == 1:
            self._root_called(module, args)
        if self._is_open():
            with torch.no_grad():
                self._leaf_called(module, args, with_gradients)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
            is_root = not self._stack and torch.is_grad_enabled() and self._is_open()
            if is_root:
                self.last_weights |= {id(p) for p in self._last_leaf.parameters(recurse=False)}
            if self._stack and not self._leaf and self._is_open():
                self.own_line_before = last_line(type(module).forward)
            if is_root and len(self.calls) < 2:
                self.calls.append(ModelCall(module, args, output_of(output)))
        if isinstance(module, nn.Sigmoid | nn.Tanh) and self._is_open() and is_plain(output):
            self._note_saturation(module, output.detach())
        is_looked_at = isinstance(module, nn.ReLU) and torch.is_grad_enabled() and self._is_open()
        if is_looked_at and is_plain(output):
            shares = self.relus.setdefault(id(module), [])
            shares.append(float((output.detach() > 0).float().mean()))
            if len(shares) == 1:
                self._kept.append(module)

    def _note_saturation(self, module: nn.Module, output: Tensor) -> None:
        slope = output * (1 - output) if isinstance(module, nn.Sigmoid) else 1 - output * output
        share = float((slope < 0.01).float().mean())
        weight = next(iter(self._last_leaf.parameters(recurse=False)), None)
        if share > 0.85 and weight is not None:
            line = self._own_line(self._last_leaf, weight)
            self._notes.add("saturated", line, share=share, what=type(module).__name__)

    def _root_called(self, module: nn.Module, args: Any) -> None:
        if next(module.parameters(), None) is None:
            return
        where = line_here(3)
        root = self.roots.setdefault(id(module), RootSeen(module, where))
        self._known = {id(p) for p in module.parameters()}
        self._leaf = 0
        tensors = list(tensors_in(args))
        if torch.is_grad_enabled():
            root.pending = self._mode_of(root)
            root.pending_line = where
            if self._is_open() and tensors and is_plain(tensors[0]):
                self.hashes = row_hashes(tensors[0])
                whole = not torch.is_floating_point(tensors[0])
                is_rich = not whole and len(tensors[0]) > 0
                is_rich = is_rich and len(torch.unique(tensors[0][0].detach())) >= _DIFFERENT
                samples = self.hashes if is_rich and self._is_first_root else []
                self.forwarded(samples, tensors[0].detach() if whole else None)
                self._is_first_root = False
        else:
            is_evaluation = self.evaluates()
            # Dropout alone in train mode draws several predictions, on purpose.
            in_training = root.module.training and self._mode_of(root)
            self._judged = where if in_training and root.has_modes and root.was_in_train else None
            if is_evaluation or _is_named_evaluation(sys._getframe(2)):
                self.loss_without_gradients()

    def loss_without_gradients(self) -> None:
        """A loss that only judges follows a call of a model in train mode."""
        if self._judged is not None:
            self._notes.add("evaluation in train mode", self._judged)
            self._judged = None

    def _mode_of(self, root: RootSeen) -> bool:
        """Whether any layer whose mode matters is in train mode."""
        if not root.has_modes:
            return root.module.training
        return any(one.training for one in root.module.modules() if isinstance(one, _MODES))

    def _leaf_called(self, module: nn.Module, args: Any, with_gradients: bool) -> None:
        own = list(module.parameters(recurse=False))
        if not own or not self._stack or id(self._stack[0]) not in self.roots:
            return
        self._leaf += 1
        where = line_here(4)
        self._last_leaf = module
        if self._leaf == 1 and isinstance(module, _FIRST_LAYERS):
            if args and is_plain(args[0]) and torch.is_floating_point(args[0]):
                if self.first_line is None:
                    self.first_line = where
                self.firsts.append(spread_of(args[0]))
        elif self._leaf == 2 and self.first_is_normalized is None:
            self.first_is_normalized = isinstance(module, _NORMS)
        for name, p in module.named_parameters(recurse=False):
            self.ran.setdefault(id(p), (p, f"{type(module).__name__}.{name}"))
            self.lines.setdefault(id(p), self._own_line(module, p))
            self.run_lines.setdefault(id(p), where)
            if with_gradients:
                self.without_gradients[id(p)] = None
            else:
                self.without_gradients.setdefault(id(p), self.no_grad_line or where)
            if id(p) not in self._known and p.requires_grad:
                kind = type(module).__name__
                some = self.strangers.setdefault(kind, [])
                some.append(id(p)) if id(p) not in some else None
                self._kept.append(module)
                self.stranger_lines.setdefault(kind, line_here(4))
        if isinstance(module, _BATCH_NORMS) and module.training and args and with_gradients:
            values = args[0].numel() // max(args[0].shape[1], 1) * _num_ranks(module)
            momentum = module.momentum if module.track_running_stats else None
            made = self._made_at(module)
            self._notes.add("batch norm", made, values=values, momentum=momentum)

    def _own_line(self, module: nn.Module, p: Tensor) -> CodeLocation | None:
        """Where a parameter was set to values of the user's, or its module was made."""
        return self.initialized.get(id(p)) or self._made_at(module)

    def _made_at(self, module: nn.Module) -> CodeLocation | None:
        known, where = self._made.get(id(module), (None, None))
        return where if known is not None and known() is module else None

    def backward_came(self) -> None:
        self._is_first_root = True
        self.calls = []
        if self.last_cut is not None and self._is_open():
            self._notes.add("cut", self.last_cut)
        self.last_cut = None
        for root in self.roots.values():
            if root.pending is not None:
                root.trained += 1
                root.was_in_train |= root.pending
                # Frozen statistics or a frozen part: the model itself is in train mode.
                is_evaluating = not root.pending and not root.module.training
                if is_evaluating and root.was_in_train and root.has_modes:
                    self._notes.add("trains in eval mode", root.pending_line, after=root.trained)
                root.pending = None

    # ------------------------------------------------------------ functions

    def _watch_dropout(self) -> None:
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
            function = getattr(F, name)

            def drop(
                input: Tensor,
                p: float = 0.5,
                training: bool = True,
                *args: Any,
                f: Any = function,
                **kwargs: Any,
            ) -> Tensor:
                is_evaluation = bool(self._stack) and not self._stack[0].training
                is_module = bool(self._stack) and isinstance(self._stack[-1], _DROPOUTS)
                if training and p > 0 and is_evaluation and not is_module:
                    self._notes.add("dropout in evaluation", line_here(), p=p)
                result: Tensor = f(input, p, training, *args, **kwargs)
                return result

            setattr(F, name, drop)

    def _watch_softmax(self) -> None:
        for owner, name in (
            (F, "softmax"),
            (F, "log_softmax"),
            (torch, "softmax"),
            (torch, "log_softmax"),
            (Tensor, "softmax"),
            (Tensor, "log_softmax"),
        ):
            function = getattr(owner, name)

            def softmax(
                input: Tensor, dim: Any = None, *args: Any, f: Any = function, **kwargs: Any
            ) -> Any:
                if self._is_open() and isinstance(dim, int) and input.ndim and input.requires_grad:
                    size = input.shape[dim]
                    if size == 1:
                        self._notes.add("softmax of one", line_here(), shape=list(input.shape))
                    elif input.ndim == 2 and dim in (0, -2) and size == len(self.hashes):
                        self._notes.add("softmax over batch", line_here(), shape=list(input.shape))
                return f(input, dim, *args, **kwargs)

            setattr(owner, name, softmax)

    def _watch_origins(self) -> None:
        """Lines at which modules are made and weights are set."""
        make = nn.Module.__init__

        @functools.wraps(make)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            if (where := line_here()) is not None:
                # By id: metrics are modules whose hash is that of their state, which comes later.
                self._made[id(module)] = weakref.ref(module), where

        setattr(nn.Module, "__init__", init)  # noqa: B010
        for name in ("zeros_", "ones_", "constant_", "normal_", "uniform_"):
            function = getattr(nn.init, name)

            def fill(tensor: Tensor, *args: Any, f: Any = function, **kwargs: Any) -> Any:
                if not is_torchs(sys._getframe(1)) and (where := line_here()) is not None:
                    self.initialized[id(tensor)] = where
                return f(tensor, *args, **kwargs)

            setattr(nn.init, name, fill)

    def _watch_cuts(self) -> None:
        """Lines that take a tensor out of its graph."""
        descriptor: Any = Tensor.data

        def get(tensor: Tensor) -> Any:
            self._note_cut(tensor)
            return descriptor.__get__(tensor)

        for name in ("detach", "item", "tolist", "numpy"):
            function = getattr(Tensor, name)

            def cut(tensor: Tensor, *args: Any, f: Any = function, **kwargs: Any) -> Any:
                self._note_cut(tensor)
                return f(tensor, *args, **kwargs)

            setattr(Tensor, name, cut)
        setattr(Tensor, "data", property(get, descriptor.__set__))  # noqa: B010
        enter = torch.no_grad.__enter__

        def enter_noted(block: Any) -> None:
            frame = sys._getframe(1)
            if self._is_open() and origin_of(frame).owner == "user":
                self.no_grad_line = user_line(frame)
            enter(block)

        setattr(torch.no_grad, "__enter__", enter_noted)  # noqa: B010

    def _watch_freezing(self) -> None:
        """Lines that turn gradients off, and those that called them: a helper serves several."""
        descriptor: Any = Tensor.requires_grad
        method = Tensor.requires_grad_

        def turn(tensor: Tensor, value: bool) -> None:
            self._note_frozen(tensor, value)
            descriptor.__set__(tensor, value)

        def turn_by_method(tensor: Tensor, requires_grad: bool = True) -> Tensor:
            self._note_frozen(tensor, requires_grad)
            return method(tensor, requires_grad)

        setattr(Tensor, "requires_grad", property(descriptor.__get__, turn))  # noqa: B010
        setattr(Tensor, "requires_grad_", turn_by_method)  # noqa: B010

    def _note_frozen(self, tensor: Tensor, is_trained: bool) -> None:
        if isinstance(tensor, nn.Parameter) and self._is_open():
            first, caller, *_ = [*user_lines(sys._getframe(2)), None, None]
            if first is not None:
                self._callers.setdefault(first, set()).add(caller)
            frozen = _Frozen(first, caller, time.monotonic())
            self._frozen[id(tensor)] = None if is_trained else frozen

    def frozen_at(self, p: Tensor, *, after_s: float, before_s: float) -> CodeLocation | None:
        """The line that turned its gradient off in between; that of its caller where there were several."""
        frozen = self._frozen.get(id(p))
        if frozen is None or frozen.line is None or not after_s <= frozen.at_s <= before_s:
            return None
        is_helper = len(self._callers[frozen.line]) > 1 and frozen.caller is not None
        return frozen.caller if is_helper else frozen.line

    def _note_cut(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None and self._is_open():
            frame = sys._getframe(2)
            if origin_of(frame).owner == "user":
                self.last_cut = user_line(frame)

    def _watch_loading(self) -> None:
        load = nn.Module.load_state_dict

        def load_state_dict(module: Any, state: Any, strict: bool = True, *a: Any, **k: Any) -> Any:
            result = load(module, state, strict, *a, **k)
            if not strict and len(module.state_dict()):
                whole = len(module.state_dict())
                found = whole - len(result.missing_keys)
                self._notes.add("loaded", line_here(), found=found, whole=whole, given=len(state))
            return result

        setattr(nn.Module, "load_state_dict", load_state_dict)  # noqa: B010


def _is_named_evaluation(frame: FrameType) -> bool:
    words = {word for one in user_lines(frame) for word in one.function.lower().split("_")}
    return bool(words & _EVALUATION) and not words & {"train", "training", "fit"}


def _num_ranks(module: nn.Module) -> int:
    """Whose values a layer takes its statistics from."""
    if not (isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized()):
        return 1
    group: Any = module.process_group
    return dist.get_world_size(group)
