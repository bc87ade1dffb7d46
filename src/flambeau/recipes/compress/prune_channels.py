"""Structured pruning: remove the least important channels from all layers that share them.

结构化剪枝：把最不重要的通道从所有共享它们的层中真正去掉。

Source: Li et al., "Pruning filters for efficient ConvNets", ICLR 2017 (arXiv:1608.08710), for the norms;
Liu et al., "Learning efficient convolutional networks through network slimming", ICCV 2017
(arXiv:1708.06519), for the weights of BatchNorm; Fang et al., "DepGraph", CVPR 2023 (arXiv:2301.12900), for
the groups of layers that lose channels together.

Not for the width of a transformer: LayerNorm and attention see all channels at once, so only the hidden
layers of its MLPs get narrower. Not for a model that torch.fx cannot follow.
"""

import copy
import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

Plan = dict[str, dict[str, list[int]]]
"""By name of a layer or parameter, the input ('in') and output ('out') channels that stay; fits JSON."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOT_TRACED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)

# Functions by what they do to channels; names without the underscore of in-place forms.
_ELEMENTWISE = re.compile(
    "relu|relu6|leaky_relu|elu|selu|celu|silu|gelu|mish|hardtanh|hardswish|hardsigmoid|sigmoid|logsigmoid|tanh"
    "|softplus|softsign|clamp|clamp_min|clamp_max|exp|log|sqrt|rsqrt|pow|abs|neg|square|i?add|i?sub|i?mul|div"
    "|i?truediv|maximum|minimum|dropout|dropout[123]d|feature_dropout|alpha_dropout|stochastic_depth"
    "|to|float|half|double|bfloat16|contiguous|clone|detach"
)
_SPATIAL = frozenset(
    f"{kind}{dims}d"
    for kind in ("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for dims in (1, 2, 3)
) | {"interpolate", "pad"}
_REDUCING = frozenset({"mean", "sum", "amax", "amin", "std", "var"})
_RESHAPING = frozenset({"view", "reshape", "expand"})
_CUTTING = frozenset({"getitem", "split", "chunk", "unbind"})
_MOVING = re.compile(
    "flatten|transpose|permute|squeeze|unsqueeze|cat|concat|concatenate|stack|flip|roll|swapaxes|movedim"
)
_DISPATCHED = {getattr(F, name): name for name in sorted(_SPATIAL) if hasattr(F, name)}
_NOT_ELEMENTWISE = re.compile(r"(Log)?Softm\w+|GLU|MultiheadAttention")


class Pruned(NamedTuple):
    """The result of `prune_channels`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
        >>> pruned = prune_channels(model, torch.randn(1, 3, 8, 8), amount=0.5)
        >>> len(pruned.plan["0"]["out"]), pruned.left
        (2, {'2': 'output: the outputs of the model'})
    """

    model: nn.Module
    """A copy with smaller layers, of the same classes and names."""
    plan: Plan
    """For each layer that became smaller, the channels it keeps."""
    left: dict[str, str]
    """For each layer that keeps all outputs, the reason: the node of the graph, and what it is."""


def prune_channels(
    model: nn.Module,
    *example: Any,
    amount: float | Mapping[str, float],
    criterion: Literal["l1", "l2", "bn"] = "l2",
    globally: bool = False,
) -> Pruned:
    """Remove the least important channels of a model.

    Channels that are added, multiplied or convolved depthwise are removed together, as the example shows; a
    grouped convolution loses whole groups. Channels stay if they are inputs or outputs of the model, or enter
    an operation that sees all channels at once (LayerNorm, attention, softmax) or has their number in its
    code. At the end the smaller model is compared in float64 with the original one in which the weights that
    read removed channels are 0.

    A channel's importance is the mean, over its layers, of its norm divided by the layer's mean norm; for
    'bn', the mean absolute weight in its BatchNorms, as training with an L1 penalty makes them.

    Args:
        model: best in eval mode; not changed.
        example: the model's arguments; one image of the final size is enough.
        amount: fraction of channels to remove, in (0, 1); or a fraction by layer, which layers that share its
            channels lose too.
        criterion: the L1 or L2 norm of a channel's weights, or 'bn'.
        globally: rank all layers' channels together; else each layer loses `amount`. One channel always
            stays.

    Returns:
        The new model, to be trained further; the plan for `apply_plan`; the unchanged layers.

    Raises:
        ValueError: torch.fx cannot follow `forward`; the model fails on the example, or has NaN; no channel
            can be removed; an amount is out of range or for a layer that cannot be pruned; or the smaller
            model fails or differs.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
        >>> prune_channels(model, torch.randn(1, 3, 8, 8), amount=0.25).model
        Sequential(
          (0): Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
          (2): Flatten(start_dim=1, end_dim=-1)
          (3): Linear(in_features=216, out_features=5, bias=True)
        )
    """
    exact = copy.deepcopy(model).double().eval()
    inputs = [_double(value) for value in example]
    graph, arguments = _trace(exact, inputs)
    with torch.no_grad():
        channels = _Channels(exact, graph)
        try:
            channels.run(*arguments, enable_io_processing=False)
        except _NOT_TRACED as error:
            raise ValueError(
                f"the model fails on the example in float64: {str(error).splitlines()[0]}; the example "
                "needs at least one image"
            ) from error
    groups, left = _groups(channels)
    scores = _scores(channels, criterion)
    for group in [group for group in groups if not group.roots <= scores.keys()]:
        groups.remove(group)
        left |= dict.fromkeys(group.names, "its channels have no BatchNorm with weights")
    _check(amount, criterion, globally, groups, left)
    plan: Plan = {}
    gone = _choose(channels, groups, scores, amount, globally)
    for name, sides in channels.numbered.items():
        for side, ids in sides.items():
            kept = [i for i, root in enumerate(channels.roots(ids)) if root not in gone]
            if len(kept) < len(ids):
                plan.setdefault(name, {})[side] = kept
    _prove(exact, plan, inputs)
    return Pruned(apply_plan(model, plan), plan, left)


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Make a model's layers as small as the pruned one's, to load its weights.

    Args:
        model: of the pruned model's class and settings; not changed.

    Returns:
        A copy with the weights of the channels that stay.

    Raises:
        ValueError: the plan is of another model: a layer is missing or has fewer channels.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> apply_plan(model, {"0": {"out": [0, 2, 5]}, "2": {"in": [0, 2, 5]}})[2]
        Linear(in_features=3, out_features=3, bias=True)
    """
    result = copy.deepcopy(model)
    for name, kept in plan.items():
        try:
            _shrink(result, name, kept)
        except (AttributeError, IndexError, TypeError) as error:
            raise ValueError(
                f"the plan does not fit {type(model).__name__} at {name!r}: {error}"
            ) from error
    return result


# ---------------------------------------------------------------- the graph


class _Tracer(fx.Tracer):
    """Does not enter layers, BatchNorms (subclasses too) and modules that torch.fx cannot follow."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, (*_CONVS, *_NORMS, nn.Linear))
        return whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _NOT_TRACED:
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def _trace(model: nn.Module, inputs: list[Any]) -> tuple[fx.Graph, list[Any]]:
    """The graph of the path that the example takes, and the values of its placeholders."""
    try:
        bound = inspect.signature(model.forward).bind(*inputs)
        bound.apply_defaults()
        arguments = {
            name: v for name, v in bound.arguments.items() if _tensors(v) or v not in ((), {})
        }
        fixed = {name: v for name, v in arguments.items() if not _tensors(v)}
        return _Tracer().trace(model, concrete_args=fixed or None), list(arguments.values())
    except _NOT_TRACED as error:
        raise ValueError(
            f"torch.fx cannot follow the forward of {type(model).__name__}: {str(error).splitlines()[0]}; a "
            "path that depends on values has to be inside a module of its own"
        ) from error


class _Channels(fx.Interpreter):
    """Runs the graph, and follows for each tensor one of the same shape with the numbers of its channels.

    Channels with the same root in `parent` are removed together; those in `frozen` stay. `numbered` has the
    numbers of the 'in' and 'out' channels of each layer.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(model, graph), garbage_collect_values=False)
        self.model = model
        self.parent: list[int] = []
        self.frozen: dict[int, str] = {}
        self.ids: dict[fx.Node, Any] = {}
        self.numbered: dict[str, dict[str, Tensor]] = {}
        self.names = {m: name for name, m in model.named_modules()}
        self.obstacles = _obstacles(model, graph)
        self.layers: dict[str, Any] = {}
        self.norms: dict[str, Any] = {}
        self.left: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.ids[n] = self._follow(n, value)
        return value

    def root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def roots(self, ids: Tensor) -> list[int]:
        return [self.root(number) for number in ids.tolist()]

    def unite(self, a: Tensor, b: Tensor) -> None:
        """Join the channels of `a` and `b`, element by element."""
        steps = zip(a.stride(), b.stride(), strict=True)
        cut = tuple(slice(1) if x == y == 0 else slice(None) for x, y in steps)
        pairs = torch.stack([a[cut].flatten(), b[cut].flatten()]).unique(dim=1)
        for x, y in pairs.T.tolist():
            self.parent[self.root(x)] = self.root(y)

    def new(self, value: Tensor, dim: int) -> Tensor:
        """New numbers for the channels of a tensor, along `dim`."""
        size = value.shape[dim] if value.ndim else 1
        numbers = torch.arange(len(self.parent), len(self.parent) + size)
        self.parent += numbers.tolist()
        shape = [1] * value.ndim
        if value.ndim:
            shape[dim] = size
        return numbers.view(shape).expand(value.shape)

    def freeze(self, ids: Any, reason: str) -> None:
        for part in _tensors(ids):
            for number in _small(part).unique().tolist():
                self.frozen.setdefault(number, reason)

    def _unknown(self, node: Any, value: Any, reason: str) -> Any:
        """Freeze the channels of all inputs and outputs of a node."""
        self.freeze([self.ids[n] for n in node.all_input_nodes], reason)
        outputs = fx.node.map_aggregate(
            value,
            lambda v: (
                self.new(torch.zeros(1), 0)[0].expand(v.shape) if isinstance(v, Tensor) else None
            ),
        )
        self.freeze(outputs, reason)
        return outputs

    def _follow(self, node: Any, value: Any) -> Any:
        if not _tensors(value):
            return None
        if node.op == "output":
            self.freeze(
                [self.ids[n] for n in node.all_input_nodes], "output: the outputs of the model"
            )
            return None
        if node.op == "placeholder":
            return self._unknown(node, value, f"{node.name}: an input of the model")
        if node.op == "get_attr":
            return self._parameter(node, value)
        if node.op == "call_module":
            return self._module(node, self.fetch_attr(node.target), value)
        return self._function(node, _name(node.target), value)

    def _parameter(self, node: Any, value: Tensor) -> Any:
        wide = [dim for dim, size in enumerate(value.shape) if size > 1]
        if len(wide) != 1 or node.target.rpartition(".")[0] in self.obstacles:
            return self._unknown(node, value, f"{node.name}: a parameter that forward reads itself")
        if node.target not in self.numbered:
            self.numbered[node.target] = {"out": self.new(value, wide[0]).flatten()}
        return self.numbered[node.target]["out"].view(value.shape)

    # ------------------------------------------------------------ modules

    def _module(self, node: Any, module: nn.Module, value: Any) -> Any:
        name = self.names[module]
        reason = f"{node.name}: {type(module).__name__} sees all channels at once, or is not known"
        if isinstance(module, (*_CONVS, nn.Linear)):
            return self._layer(node, module, value)
        ids = self.ids[node.all_input_nodes[0]] if len(node.all_input_nodes) == 1 else None
        family = type(module).__module__.removeprefix("torch.nn.modules.")
        if not isinstance(ids, Tensor) or _NOT_ELEMENTWISE.fullmatch(type(module).__name__):
            return self._unknown(node, value, reason)
        if isinstance(module, _NORMS) or (
            isinstance(module, nn.PReLU) and module.num_parameters > 1
        ):
            return self._per_channel(node, name, ids, value)
        if isinstance(module, nn.Flatten):
            return module(ids)
        if family in ("pooling", "padding", "upsampling") and isinstance(value, Tensor):
            return self._spatial(node, ids, value)
        if isinstance(module, nn.Identity) or family in ("activation", "dropout"):
            return ids
        return self._unknown(node, value, reason)

    def _per_channel(self, node: Any, name: str, ids: Tensor, value: Tensor) -> Any:
        row = _row(ids, 1)
        if row is None or name in self.obstacles:
            return self._unknown(node, value, self.obstacles.get(name, _mixed(node)))
        if name in self.numbered:
            self.unite(row, self.numbered[name]["out"])
        self.numbered[name] = {"out": row}
        if isinstance(module := self.fetch_attr(node.target), _NORMS):
            self.norms[name] = module
        return ids

    def _layer(self, node: Any, layer: Any, value: Tensor) -> Any:
        """New numbers for the outputs; all inputs and outputs of one group are joined."""
        name = self.names[layer]
        dim = -1 if isinstance(layer, nn.Linear) else 1
        source = node.all_input_nodes[0]
        row = _row(self.ids[source], dim)
        reason = self.obstacles.get(name)
        if reason is None and row is None:
            reason = _mixed(node)
        if reason is None and not _is_linear(layer, self.env[source], value):
            reason = f"{node.name}: {type(layer).__name__} computes its weights"
        if reason is not None:
            self.left[name] = reason
            return self._unknown(node, value, reason)
        assert row is not None
        if name not in self.numbered:
            outputs = _row(self.new(value, dim), dim)
            assert outputs is not None
            self.numbered[name] = {"in": row, "out": outputs}
            self.layers[name] = layer
        inputs, outputs = self.numbered[name]["in"], self.numbered[name]["out"]
        self.unite(row, inputs)
        groups = getattr(layer, "groups", 1)
        if groups > 1:
            for part in (inputs, outputs):
                grouped = part.view(groups, -1)
                self.unite(grouped, grouped[:, :1].expand_as(grouped))
            self.unite(inputs.view(groups, -1)[:, 0], outputs.view(groups, -1)[:, 0])
        shape = [1] * value.ndim
        shape[dim] = -1
        return outputs.view(shape).expand(value.shape)

    # ------------------------------------------------------------ functions

    def _function(self, node: Any, name: str, value: Any) -> Any:
        tensors = [n for n in node.all_input_nodes if isinstance(self.ids[n], Tensor)]
        if name == "getitem" and not tensors:  # an item of a tuple of tensors
            return self.ids[node.args[0]][node.args[1]]
        first = self.ids[tensors[0]] if tensors else None
        if first is not None and isinstance(value, Tensor):
            if _ELEMENTWISE.fullmatch(name):
                return self._elementwise([self.ids[n] for n in tensors], value, node.name)
            if name in _SPATIAL:
                return self._spatial(node, first, value)
            if name in _REDUCING:
                return self._reduced(node, first, value)
            if name in _RESHAPING:
                return self._reshaped(node)
            if _MOVING.fullmatch(name):
                return self._moved(node)
        if first is not None and name in _CUTTING:
            return self._cut(node, name, first, value)
        return self._unknown(
            node, value, f"{node.name}: {name} sees all channels at once, or is not known"
        )

    def _elementwise(self, operands: list[Tensor], value: Tensor, name: str) -> Tensor:
        widest, *others = sorted(operands, key=lambda ids: -ids.numel())
        result = widest.expand(value.shape)
        for ids in others:
            sizes = [1] * (value.ndim - ids.ndim) + list(ids.shape)
            if any(size == 1 and _varies(result, dim) for dim, size in enumerate(sizes)):
                # One channel for all others, such as an attention map.
                self.freeze(ids, f"{name}: its channels are spread over others")
            else:
                self.unite(ids.expand(value.shape), result)
        return result

    def _spatial(self, node: fx.Node, ids: Tensor, value: Tensor) -> Any:
        if any(_varies(ids, dim) for dim in range(2, ids.ndim)) or ids.ndim != value.ndim:
            return self._unknown(node, value, _mixed(node))
        return ids[(slice(None), slice(None), *[slice(1)] * (ids.ndim - 2))].expand(value.shape)

    def _reduced(self, node: Any, ids: Tensor, value: Tensor) -> Any:
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or any(_varies(ids, dim) for dim in dims):
            return self._unknown(node, value, _mixed(node))
        return ids.amax(dims, keepdim=value.ndim == ids.ndim)

    def _moved(self, node: Any) -> Any:
        """Apply the operation itself to the numbers."""
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: self.env[n] if self.ids[n] is None else self.ids[n]
        )
        if node.op == "call_method":  # an expanded tensor has no view of another shape
            name = "reshape" if node.target == "view" else node.target
            return getattr(args[0], name)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)

    def _reshaped(self, node: Any) -> Tensor:
        """A size that the code writes as a number cannot change, so its channels are joined."""
        ids: Tensor = self._moved(node)
        sizes = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
        for dim, size in enumerate(sizes):
            if isinstance(size, int) and size > 1 and _varies(ids, dim):
                self.unite(ids, ids.narrow(dim, 0, 1).expand_as(ids))
        return ids

    def _cut(self, node: Any, name: str, ids: Tensor, value: Any) -> Any:
        """Channels can only be cut into equal parts: any other index is a number in the code."""
        if name == "getitem":
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            plain = all(isinstance(i, int | slice) or i is Ellipsis for i in index)
            after = index[index.index(Ellipsis) + 1 :] if plain and Ellipsis in index else ()
            front = index[: len(index) - len(after)]
            cut = [d for d, i in enumerate(front) if i not in (slice(None), Ellipsis)]
            cut += [d - len(after) for d, i in enumerate(after) if i != slice(None)]
        else:
            position = 1 if name == "unbind" else 2
            plain = True
            cut = [node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)]
        if plain and not any(_varies(ids, dim) for dim in cut):
            return self._moved(node)
        if name == "chunk":
            parts = self._moved(node)
            if len({part.shape for part in parts}) == 1:
                for part in parts[1:]:
                    self.unite(part, parts[0])
                return parts
        return self._unknown(
            node, value, f"{node.name}: {name} at an index that is written as a number"
        )


def _obstacles(model: nn.Module, graph: fx.Graph) -> dict[str, str]:
    """Layers whose weights something else computes, reads or shares, and the reason to keep them."""
    read = {n.target.rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}
    owners = defaultdict(list)
    reasons = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(name)
        if not isinstance(module, (*_CONVS, *_NORMS, nn.Linear, nn.PReLU)):
            continue
        if parametrize.is_parametrized(module):
            reasons[name] = f"{name}: a parametrization computes its weights"
        elif any(value for key, value in vars(module).items() if key.endswith("_hooks")):
            reasons[name] = f"{name}: it has hooks"
        elif name in read:
            reasons[name] = f"{name}: forward reads its weights itself"
    shared = {name: names for names in owners.values() if len(names) > 1 for name in names}
    return reasons | {
        name: f"{name}: shares weights among {', '.join(n)}" for name, n in shared.items()
    }


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target.removesuffix("_")
    if target is operator.getitem:
        return "getitem"
    return _DISPATCHED.get(target, getattr(target, "__name__", str(target))).removesuffix("_")


def _mixed(node: fx.Node) -> str:
    return f"{node.name}: what it reads has channels in more than one dimension"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _double(part)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_double, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _small(ids: Tensor) -> Tensor:
    """The numbers, with size 1 in the dimensions that are expanded."""
    return ids[tuple(slice(1) if step == 0 else slice(None) for step in ids.stride())]


def _varies(ids: Tensor, dim: int) -> bool:
    ids = _small(ids)
    return bool((ids != ids.narrow(dim, 0, 1)).any())


def _row(ids: Any, dim: int) -> Tensor | None:
    """The numbers along one dimension; None if they change along another."""
    if not isinstance(ids, Tensor) or any(
        _varies(ids, d) for d in range(ids.ndim) if d != dim % ids.ndim
    ):
        return None
    ids = ids.movedim(dim, -1)
    row: Tensor = ids[(0,) * (ids.ndim - 1)].contiguous()
    return row


def _is_linear(layer: Any, x: Tensor, value: Tensor) -> bool:
    """Whether a layer of a custom class uses its weight unchanged: twice the weight, twice the output."""
    if type(layer).__module__.startswith("torch."):
        return True
    doubled = copy.deepcopy(layer)
    doubled.weight.mul_(2)
    bias = layer.bias.view(-1, *[1] * (value.ndim - 2)) if layer.bias is not None else 0
    return torch.allclose(doubled(x) - bias, 2 * (value - bias))


# ---------------------------------------------------------------- the choice


class _Group(NamedTuple):
    """Layers that share channels, and the roots of the channels that can be removed."""

    names: set[str]
    roots: set[int]


def _groups(channels: _Channels) -> tuple[list[_Group], dict[str, str]]:
    """The groups, and the reason for each layer that is in none."""
    frozen = {channels.root(number): reason for number, reason in channels.frozen.items()}
    groups: list[_Group] = []
    left = dict(channels.left)
    for name in channels.layers:
        roots = channels.roots(channels.numbered[name]["out"])
        free = set(roots) - frozen.keys()
        if not free:
            left[name] = frozen[roots[0]]
        elif len(set(roots)) == 1:
            left[name] = f"{name}: all its channels go together"
        else:
            joined = [group for group in groups if group.roots & free]
            groups = [group for group in groups if not group.roots & free]
            groups.append(
                _Group(
                    {name}.union(*(g.names for g in joined)), free.union(*(g.roots for g in joined))
                )
            )
    return groups, left


def _scores(channels: _Channels, criterion: str) -> dict[int, float]:
    """The importance of each root: the mean over the layers that have it."""
    sizes_by_root = defaultdict(list)
    for name, sides in channels.numbered.items():
        module = channels.layers.get(name)
        if criterion == "bn":
            norm = channels.norms.get(name)
            if norm is None or norm.weight is None:
                continue
            source = norm.weight
            sizes = norm.weight.detach().abs()
        elif module is not None:
            source = module.weight
            rows = _rows(module)
            sizes = torch.linalg.vector_norm(rows, ord=1 if criterion == "l1" else 2, dim=1)
            sizes = sizes / sizes.mean().clamp(min=1e-30)
        else:
            continue
        if not source.isfinite().all():
            raise ValueError(f"the weights that rank the channels of {name} are not finite")
        for root, size in zip(channels.roots(sides["out"]), sizes.tolist(), strict=True):
            sizes_by_root[root].append(size)
    return {root: sum(sizes) / len(sizes) for root, sizes in sizes_by_root.items()}


def _rows(layer: Any) -> Tensor:
    """The weights as (output channels, weights per channel)."""
    weight: Tensor = layer.weight.detach()
    if isinstance(layer, _TRANSPOSED):
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def _choose(
    channels: _Channels,
    groups: list[_Group],
    scores: dict[int, float],
    amount: float | Mapping[str, float],
    globally: bool,
) -> set[int]:
    """The roots to remove: the lowest scores of each group, or of all groups together."""
    named = amount if isinstance(amount, Mapping) else {}
    pools = []
    for names, roots in groups:
        amounts = {named[name] for name in names & named.keys()}
        if len(amounts) > 1:
            raise ValueError(
                f"{sorted(names & named.keys())} share channels, so they need one amount"
            )
        if amounts or not isinstance(amount, Mapping):
            pools.append((roots, amounts.pop() if amounts else amount))
    if globally:
        pools = [(set().union(*(group.roots for group in groups)), amount)]
    gone: set[int] = set()
    for roots, part in pools:
        ranked = sorted(roots, key=lambda root: (scores[root], root))
        gone.update(ranked[: round(float(part) * len(ranked))])  # type: ignore[arg-type]
    for name in channels.layers:
        roots = set(channels.roots(channels.numbered[name]["out"]))
        if roots <= gone:
            gone.remove(max(roots, key=lambda root: (scores[root], root)))
    return gone


def _check(
    amount: float | Mapping[str, float],
    criterion: str,
    globally: bool,
    groups: list[_Group],
    left: dict[str, str],
) -> None:
    amounts = amount.values() if isinstance(amount, Mapping) else [amount]
    if not amounts or not all(0 < part < 1 for part in amounts):
        raise ValueError(f"an amount is in (0, 1), got {amount}")
    if criterion not in ("l1", "l2", "bn"):
        raise ValueError(f"criterion is 'l1', 'l2' or 'bn', got {criterion!r}")
    if globally and isinstance(amount, Mapping):
        raise ValueError("globally=True ranks all layers together: it takes one amount")
    if not groups:
        reasons = "; ".join(dict.fromkeys(left.values()))
        raise ValueError(f"no channel can be removed: {reasons or 'no layer was found'}")
    for name in amount if isinstance(amount, Mapping) else ():
        if not any(name in group.names for group in groups):
            raise ValueError(
                f"{name!r} cannot be pruned: {left.get(name, 'there is no such layer')}"
            )


# ---------------------------------------------------------------- the layers


def _shrink(model: nn.Module, name: str, kept: dict[str, list[int]]) -> None:
    owner_name, _, last = name.rpartition(".")
    module: Any = getattr(model.get_submodule(owner_name), last) if last else model
    if isinstance(module, Tensor):
        dim = max(range(module.ndim), key=lambda d: module.shape[d])
        _select(model.get_submodule(owner_name), last, dim, kept["out"])
        return
    outputs = kept.get("out")
    if isinstance(module, (*_CONVS, nn.Linear)):
        _shrink_layer(module, kept.get("in"), outputs)
    else:
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            _select(module, tensor, 0, outputs)
        counted = "num_parameters" if isinstance(module, nn.PReLU) else "num_features"
        setattr(module, counted, len(outputs or ()))


def _shrink_layer(layer: Any, inputs: list[int] | None, outputs: list[int] | None) -> None:
    is_conv = not isinstance(layer, nn.Linear)
    transposed = isinstance(layer, _TRANSPOSED)
    in_name, out_name = (
        ("in_channels", "out_channels") if is_conv else ("in_features", "out_features")
    )
    if is_conv and layer.groups > 1:  # whole groups go, so only one dimension of the weight shrinks
        kept = inputs if transposed else outputs
        assert inputs is not None and outputs is not None
        _select(layer, "weight", 0, kept)
        layer.groups = layer.groups * len(outputs) // layer.out_channels
    else:
        _select(layer, "weight", int(not transposed), inputs)
        _select(layer, "weight", int(transposed), outputs)
    _select(layer, "bias", 0, outputs)
    if inputs is not None:
        setattr(layer, in_name, len(inputs))
    if outputs is not None:
        setattr(layer, out_name, len(outputs))


def _select(owner: nn.Module, name: str, dim: int, kept: list[int] | None) -> None:
    tensor = getattr(owner, name, None)
    if tensor is None or kept is None:
        return
    smaller = tensor.detach().index_select(dim, torch.tensor(kept, device=tensor.device))
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, tensor.requires_grad)
    setattr(owner, name, smaller)


def _prove(model: nn.Module, plan: Plan, inputs: list[Any]) -> None:
    """Check that the smaller model computes what the model computes without the removed channels."""
    masked = copy.deepcopy(model)
    for name, kept in plan.items():
        if "in" not in kept:
            continue
        layer: Any = masked.get_submodule(name)
        if getattr(layer, "groups", 1) == 1:
            read = (
                layer.weight.data
                if isinstance(layer, _TRANSPOSED)
                else layer.weight.data.transpose(0, 1)
            )
            gone = torch.ones(len(read), dtype=torch.bool)
            gone[kept["in"]] = False
            read[gone.to(read.device)] = 0
    with torch.no_grad():
        expected = _tensors(masked(*inputs))
        try:
            got = _tensors(apply_plan(model, plan)(*inputs))
        except _NOT_TRACED as error:
            raise ValueError(
                f"the smaller model fails: {error}; does a size stand in its code?"
            ) from error
    for a, b in zip(got, expected, strict=True):
        if b.isnan().any():
            raise ValueError("the model gives NaN on the example, which shows nothing")
        if a.shape != b.shape or not _equal(a, b):
            raise ValueError(
                "the smaller model computes something else: "
                "a size in its code depends on the number of channels"
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Up to the rounding of float64; -inf, as for masked classes, equals itself."""
    scale = b.abs().masked_fill(b.isinf(), 0.0).max().clamp(min=1e-3)
    return bool(((a == b) | ((a - b).abs() <= 1e-8 * scale)).all())
