"""Records a forward pass: calls of modules, operations, and whose results they take."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path

from flambeau.errors import InputError
from flambeau.inspection.watched_forward import follow, hooked, storage_key, tensors_of

_Result = TypeVar("_Result")


@dataclass
class Call:
    """A call of a module.

    Attributes:
        name: of the module in the model, '' is the model itself.
    """

    name: str
    number: int
    module: nn.Module
    calls: int = 0
    operations: int = 0
    output: tuple[tuple[int, ...], ...] = ()

    @property
    def depth(self) -> int:
        """0 of the model, 1 of its children."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class Operation:
    """An operation of torch, an input (without calls), or a module that returned its input.

    Attributes:
        name: as in torch.ops.aten, '' for a module that returned its input.
        calls: in which it happens, the model's first.
        sources: indices of operations whose results it takes.
    """

    name: str
    calls: tuple[Call, ...]
    sources: tuple[int, ...]
    reads: tuple[str, ...] = ()
    output: tuple[tuple[int, ...], ...] = ()


@dataclass
class RecordedPass:
    """What `record` gives its reader while tensors exist.

    Attributes:
        model: the copy that ran.
        values: it ran on random values, because it reads some.
        operations: in order, the inputs first.
        inputs: (name, tensor) of each input.
        outputs: (name, tensor, index of its operation, or None).
        nodes: the nodes of autograd's graph, and the calls in which they were made.
    """

    model: nn.Module
    training: bool
    values: bool
    operations: list[Operation] = field(default_factory=list)
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    outputs: list[tuple[str, Tensor, int | None]] = field(default_factory=list)
    nodes: dict[Any, tuple[Call, ...]] = field(default_factory=dict)


def unit(calls: Sequence[Call], depth: int) -> Call | None:
    """The nested call drawn as a box at this depth; None for an operation by itself."""
    for call in calls:
        if call.depth >= depth or (not call.calls and call.name):
            return call
    return None


def record(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reader: Callable[[RecordedPass], _Result],
) -> _Result:
    """Watch a forward pass in training mode, or in evaluation mode if that fails, and call `reader` with it.

    As of `model_graphs`. InputError: the model does not take the arguments; its message is included.
    """

    def watch(
        twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], values: bool
    ) -> _Result:
        seen = RecordedPass(twin.train(training), training, values)
        mode = _Watch(seen, args, kwargs)
        with torch.enable_grad(), mode.hooks(), mode:
            output = twin(*args, **kwargs)
        mode.end(output)
        return reader(seen)

    training = True
    try:
        return follow(model, args, kwargs, watch)
    except InputError:
        training = False  # BatchNorm refuses one value per channel in training
        return follow(model, args, kwargs, watch)


class _Watch(TorchDispatchMode):
    def __init__(self, seen: RecordedPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self._calls: list[Call] = []
        self._numbers: dict[int, int] = defaultdict(int)
        self._makers: dict[int, int] = {}  # id of a tensor to the index of its operation
        self._storages: dict[int, list[int]] = defaultdict(list)  # ids of the tensors in each
        self._alive: list[Tensor] = []  # so that no id comes twice
        self._state = {
            id(tensor): name
            for name, tensor in (*seen.model.named_parameters(), *seen.model.named_buffers())
        }
        for name, tensor in _named_inputs(seen.model, args, kwargs):
            seen.inputs.append((name, tensor))
            self._add(Operation(name, (), (), output=(tuple(tensor.shape),)), [tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = tensors_of((args, kwargs))
        made = tensors_of(out)
        if made:
            name = func.name().removeprefix("aten::").partition(".")[0]
            shapes = tuple(tuple(one.shape) for one in made)
            reads = tuple(self._state[id(one)] for one in taken if id(one) in self._state)
            operation = Operation(name, tuple(self._calls), self._sources(taken), reads, shapes)
            self._add(operation, made)
        return out

    def _sources(self, taken: list[Tensor]) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys(maker for one in taken if (maker := self._maker(one)) is not None)
        )

    def _maker(self, tensor: Tensor) -> int | None:
        """The operation that made a tensor; a view that torch creates anew is recognized by its storage."""
        if (maker := self._makers.get(id(tensor))) is not None or id(tensor) in self._state:
            return maker
        known = self._storages.get(storage_key(tensor), [])
        return max((self._makers[one] for one in known), default=None)

    def _add(self, operation: Operation, made: list[Tensor]) -> None:
        number = len(self.seen.operations)
        self.seen.operations.append(operation)
        for call in operation.calls:
            call.operations += 1
        for one in made:
            in_place = id(one) in self._makers
            self._makers[id(one)] = number
            if in_place:  # all views of its memory have changed too
                self._makers |= dict.fromkeys(self._storages[storage_key(one)], number)
            elif id(one) not in self._state:
                self._storages[storage_key(one)].append(id(one))
                self._alive.append(one)

    def hooks(self) -> AbstractContextManager[None]:
        """While the context is open, the calls of all modules are recorded."""
        names: dict[int, str] = {}
        for name, module in self.seen.model.named_modules():
            names.setdefault(id(module), name)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._autograd((args, kwargs))
            self._numbers[id(module)] += 1
            if self._calls:
                self._calls[-1].calls += 1
            self._calls.append(Call(names[id(module)], self._numbers[id(module)], module))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._autograd(output)
            call = self._calls[-1]
            tensors = tensors_of(output)
            call.output = tuple(tuple(one.shape) for one in tensors)
            if not call.operations and tensors:
                sources = self._sources(tensors)
                self._add(Operation("", tuple(self._calls), sources, (), call.output), [])
                # From here on the tensors count as results of this module.
                number = len(self.seen.operations) - 1
                self._makers |= {id(one): number for one in tensors if id(one) in self._makers}
            self._calls.pop()

        return hooked(self.seen.model, before, after)

    def _autograd(self, tree: Any) -> None:
        """Nodes of autograd that are new were made in the calls that are open now."""
        todo = [tensor.grad_fn for tensor in tensors_of(tree)]
        while todo:
            node = todo.pop()
            if node is not None and node not in self.seen.nodes:
                self.seen.nodes[node] = tuple(self._calls)
                todo += [one for one, _ in node.next_functions]

    def end(self, output: Any) -> None:
        for name, tensor in _named_tensors("", output):
            self.seen.outputs.append((name, tensor, self._maker(tensor)))


def _named_tensors(prefix: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its path in the tree."""
    leaves, _ = tree_flatten_with_path(tree)
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            yield prefix + "".join(map(str, path)), leaf


def _named_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with the name of its argument and its path in that."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call will say what is wrong
        bound = {f"argument {n}": one for n, one in enumerate(args)} | kwargs
    for name, tree in bound.items():
        yield from _named_tensors(name, tree)
