"""Fold each BatchNorm into the convolution or linear layer before it, anywhere in a model.

把每个 BatchNorm 折叠进它前面的卷积层或线性层，无论在模型的哪个位置。

Source: Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
inference", CVPR 2018, section 3.2 (arXiv:1712.05877).

Not before more training: a folded model no longer normalizes. Not for a model whose forward branches on
values, which torch.fx cannot follow.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The errors that a forward raises when it needs the value of a torch.fx.Proxy.
_NOT_TRACED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)


class Folded(NamedTuple):
    """A model without the BatchNorms that could be folded.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
        >>> _, folded, left = fold_batchnorm(model, torch.randn(1, 3, 8, 8))
        >>> folded, left
        ({'1': '0'}, {'3': 'its input is not the output of a convolution or linear layer (_2)'})
    """

    model: nn.Module
    """A copy, of the same class, with an nn.Identity in place of each folded BatchNorm."""
    folded: dict[str, str]
    """Names of the folded BatchNorms, and of the layers that they were folded into."""
    left: dict[str, str]
    """Names of the other BatchNorms, with the reason."""


def fold_batchnorm(model: nn.Module, *example: Any) -> Folded:
    """Fold all BatchNorms that can be folded, and report why the others are left.

    A BatchNorm is folded if it alone reads the output of a layer (Conv1d to 3d, transposed, grouped; Linear,
    or a class of yours that is linear in its weight), if both are called once, and if the folded layer equals
    the pair on the example in float64. timm's BatchNormAct2d leaves its activation.

    Args:
        model: in eval mode; a BatchNorm in training mode is left. Not changed.
        example: the model's arguments, on its device; a small batch is enough.

    Returns:
        A new model of the same dtypes and devices, and the folded and the other BatchNorms.

    Raises:
        ValueError: torch.fx cannot follow `forward`, outputs differ or are NaN, or a hook computes a layer's
            weights.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        >>> fold_batchnorm(model, torch.randn(2, 3)).model
        Sequential(
          (0): Linear(in_features=3, out_features=4, bias=True)
          (1): Identity()
        )
    """
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None) if isinstance(layer, _LAYERS) else None
        if weight is not None and not parametrize.is_parametrized(layer) and not weight.is_leaf:
            raise ValueError(
                f"a hook computed the weight of {name!r} (weight_norm of torch.nn.utils, pruning), so the "
                "model cannot be copied: remove it first"
            )
    graph = _trace(model, example)
    exact = copy.deepcopy(model).double()
    inputs = [_double(value) for value in example]
    pairs, left = _pairs(model, graph)
    unequal, expected = _measure(exact, pairs, inputs)
    if any(bool(output.isnan().any()) for output in expected):
        raise ValueError(
            "the model gives NaN on the example, which shows nothing: are its weights, running statistics "
            "and the example finite?"
        )
    left |= unequal
    folded = {norm: layer for norm, layer in pairs.items() if norm not in unequal}
    result = copy.deepcopy(model)
    for copied in (exact, result):
        for norm_name, layer_name in folded.items():
            layer, norm = copied.get_submodule(layer_name), copied.get_submodule(norm_name)
            _replace(copied, layer, fold_pair(layer, norm))
            _replace(copied, norm, _what_stays(norm))
    if not _equal(_run(exact, inputs), expected):
        raise ValueError(
            "the folded model gives something else on the example: a layer is used in a way that torch.fx "
            "does not show"
        )
    return Folded(result, folded, left)


def fold_pair(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """Copy a layer and fold the BatchNorm after it into the copy.

    BatchNorm is (y - mean) * factor + beta with factor = gamma / sqrt(var + eps), computed in float64.

    Args:
        layer: a convolution, transposed or not, or Linear with C output channels.
        norm: with running statistics of C channels, in either mode.

    Returns:
        A layer with bias, of the dtype and on the device of `layer`.

    Raises:
        TypeError: another kind of layer.
        ValueError: no running statistics, other numbers of channels, or weights that are computed
            (weight_norm, spectral_norm, pruning).

    Example:
        >>> layer, norm = nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6).eval()
        >>> x = torch.randn(1, 4, 5, 5)
        >>> torch.allclose(fold_pair(layer, norm)(x), norm(layer(x)), atol=1e-5)
        True
    """
    if not isinstance(layer, _LAYERS) or not isinstance(norm, _NORMS):
        raise TypeError(
            f"a convolution or linear layer and a BatchNorm, got {_kind(layer)} and {_kind(norm)}"
        )
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("BatchNorm has no running statistics, so it depends on the batch")
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise ValueError(
            "the layer's weight is computed from others: remove weight_norm or pruning first"
        )
    num_out = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if norm.num_features != num_out:
        raise ValueError(f"a layer of {num_out} channels before BatchNorm of {norm.num_features}")
    weight = layer.weight.detach()
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    shift = -norm.running_mean.double()
    if layer.bias is not None:
        shift = shift + layer.bias.detach().double()
    factor = factor if norm.weight is None else factor * norm.weight.detach().double()
    shift = shift * factor
    shift = shift if norm.bias is None else shift + norm.bias.detach().double()
    if isinstance(layer, _TRANSPOSED):  # (in, out / groups, ...): a group's inputs see its outputs
        rows = factor.view(layer.groups, 1, -1).expand(-1, len(weight) // layer.groups, -1)
        factor = rows.reshape(weight.shape[:2])
    factor = factor.view(*factor.shape, *[1] * (weight.ndim - factor.ndim))
    result = copy.deepcopy(layer)
    trains = layer.weight.requires_grad
    result.weight = nn.Parameter((weight.double() * factor).to(weight.dtype), trains)
    result.bias = nn.Parameter(shift.to(weight.dtype), trains)
    return result


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another, under each of its names."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(name, new)


def _kind(value: object) -> str:
    return type(value).__name__


def _what_stays(norm: nn.Module) -> nn.Module:
    """The dropout and activation of timm's BatchNormAct2d; an nn.Identity for BatchNorm itself."""
    parts = [part for part in norm.children() if not isinstance(part, nn.Identity)]
    rest: nn.Module = nn.Sequential(*parts) if parts else nn.Identity()
    return rest.train(norm.training)


class _Tracer(fx.Tracer):
    """Does not enter layers, BatchNorms (subclasses too) and modules that torch.fx cannot follow."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, (*_LAYERS, *_NORMS))
        return whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _NOT_TRACED:
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def _trace(model: nn.Module, example: tuple[Any, ...]) -> fx.Graph:
    try:
        bound = inspect.signature(model.forward).bind(*example)
        bound.apply_defaults()
        fixed = {
            name: value
            for name, value in bound.arguments.items()
            if not _flat(value) and value not in ((), {})
        }
        return _Tracer().trace(model, concrete_args=fixed or None)
    except _NOT_TRACED as error:
        raise ValueError(
            f"torch.fx cannot follow the forward of {_kind(model)}: {str(error).splitlines()[0]}; a path "
            "that depends on values has to be inside a module of its own"
        ) from error


def _pairs(model: nn.Module, graph: fx.Graph) -> tuple[dict[str, str], dict[str, str]]:
    """BatchNorms with the layer to fold them into, and the others with the reason."""
    modules = dict(model.named_modules(remove_duplicate=False))
    calls = Counter(modules[n.target] for n in graph.nodes if n.op == "call_module")
    names = {m: name for name, m in model.named_modules() if isinstance(m, _NORMS)}
    nodes = {modules[n.target]: n for n in graph.nodes if n.op == "call_module"}
    read = {n.target.rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}
    pairs, left = {}, {}
    for norm, name in names.items():
        if not calls[norm]:
            left[name] = "forward does not call it here, or calls it where torch.fx cannot follow"
            continue
        before = nodes[norm].all_input_nodes[0]
        layer = modules.get(before.target) if before.op == "call_module" else None
        if not isinstance(layer, _LAYERS):
            left[name] = (
                f"its input is not the output of a convolution or linear layer ({before.name})"
            )
        elif reason := next(_obstacles((layer, norm), (before, nodes[norm]), calls, read), None):
            left[name] = reason
        else:
            pairs[name] = before.target
    return pairs, left


def _obstacles(
    pair: tuple[nn.Module, nn.Module],
    nodes: tuple[fx.Node, fx.Node],
    calls: Counter[nn.Module],
    read: set[str],
) -> Iterator[str]:
    """Reasons why a BatchNorm cannot be folded into the layer before it."""
    for module, node in zip(pair, nodes, strict=True):
        if calls[module] > 1:
            yield f"{node.target!r} is called {calls[module]} times"
        if parametrize.is_parametrized(module):
            yield f"{node.target!r} has a parametrization: its weights are computed"
        if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
            yield f"{node.target!r} has hooks, which would see something else"
        if node.target in read:
            yield f"forward reads the weights of {node.target!r} itself"
    others = sorted(user.name for user in nodes[0].users if user is not nodes[1])
    if others:
        yield f"the output of {nodes[0].target!r} is also read by {', '.join(others)}"
    norm = pair[1]
    if norm.training:
        yield "it is in training mode: call eval() first"
    if norm.running_mean is None:
        yield "it has no running statistics, so it depends on the batch"


def _measure(
    exact: nn.Module, pairs: dict[str, str], inputs: list[Any]
) -> tuple[dict[str, str], list[Tensor]]:
    """The pairs whose folded layer computes something else, with the reason; and the model's outputs."""
    seen: dict[str, Any] = {}
    unequal = {}

    def compare(norm: nn.Module, output: Any, name: str) -> None:
        layer = exact.get_submodule(pairs[name])
        try:
            args, more = seen.pop(name)
            got = _what_stays(norm)(fold_pair(layer, norm)(*args, **more))
            same = _equal([got], [output])
        except (TypeError, ValueError, RuntimeError):
            same = False
        if same and not output.numel():
            unequal[name] = "its output is empty on the example, which shows nothing"
        elif not same:
            unequal[name] = (
                f"{pairs[name]!r} ({_kind(layer)}) with folded weights gives something else"
            )

    handles = []
    for name, layer in pairs.items():
        handles.append(
            exact.get_submodule(layer).register_forward_pre_hook(
                lambda m, args, more, n=name: seen.update({n: (args, more)}), with_kwargs=True
            )
        )
        handles.append(
            exact.get_submodule(name).register_forward_hook(
                lambda m, args, out, n=name: compare(m, out, n)
            )
        )
    expected = _run(exact, inputs)
    for handle in handles:
        handle.remove()
    return unequal, expected


def _run(model: nn.Module, inputs: list[Any]) -> list[Tensor]:
    devices = {p.device: p for p in model.parameters() if p.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(list(devices)):
        torch.manual_seed(0)  # the same dropout, if a module is in training mode
        return _flat(model(*inputs))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [t for part in parts for t in _flat(part)] if isinstance(value, dict | list | tuple) else []
    )


def _equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Up to the rounding of float64, which grows with the depth."""
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape:
            return False
        scale = b.abs().masked_fill(b.isinf(), 0.0).max() if b.numel() else b.new_zeros(())
        # Where both are -inf, as for masked classes, their difference is NaN.
        if not bool(((a == b) | ((a - b).abs() <= 1e-9 * scale.clamp(min=1e-3))).all()):
            return False
    return True


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _double(part)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_double, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
