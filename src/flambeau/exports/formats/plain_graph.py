"""Interprets a graph of torch.export: it calls operators of torch by their names, and nothing else.

Source: own; the graph is the JSON of torch.export.save (schema 8 of PyTorch 2.8 to 2.15).
Shape expressions are not needed: the graph computes what was symbolic in the trace.
Not for graphs with custom operators, C++ objects, mutated buffers or loops: they are refused by name.
"""

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import InputError
from flambeau.exports.formats.pt2_archive import NotPlain, PlainArchive, dtype_of

_MAJOR = 8
_ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
# They open a file that the graph names, or do not check where they read and write.
_FORBIDDEN = {"from_file", "save", "set", "set_", "segment_reduce"}
# The operators with an underscore that traces of models contain; others may not check their arguments.
_INNER = {
    "__and__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__lshift__",
    "__or__",
    "__rshift__",
    "__xor__",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_cdist_forward",
    "_conj",
    "_conj_physical",
    "_convolution",
    "_convolution_mode",
    "_euclidean_dist",
    "_fft_c2c",
    "_fft_c2r",
    "_fft_r2c",
    "_is_all_true",
    "_is_any_true",
    "_local_scalar_dense",
    "_log_softmax",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_neg_view",
    "_prelu_kernel",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
    "_shape_as_tensor",
    "_softmax",
    "_stack",
    "_to_copy",
    "_trilinear",
    "_unique2",
    "_unsafe_view",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_weight_norm",
    "_weight_norm_interface",
}
_NO_TENSOR = re.compile(r"Storage|Stream|RRef|Future|Any|__torch__|Dict|Enum|\bt\d?\b|filename")
_STRIDED = 7
_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_MOST_BITS = 64
_OPERATOR = type(torch.ops.aten.add.Tensor)
# What one step may make: so much, or so many times the inputs and weights; chosen. Scores of 150 classes at
# the size of the image are 200 times its 8-bit pixels.
_MOST_BYTES = 4 << 30
_MOST_TIMES = 256


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers that refuses integers which would grow until they take all memory."""

    def call(*args: Any) -> Any:
        if function in (operator.pow, operator.lshift) and not abs(args[1]) <= _MOST_BITS:
            raise NotPlain(f"{function.__name__} of {args[1]}")
        result = function(*args)
        if type(result) is int and result.bit_length() > _MOST_BITS:
            raise NotPlain(f"an integer of {result.bit_length()} bits")
        return result

    return call


_NUMBER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": _bounded(getattr(operator, name))
        for name in (
            "eq",
            "ne",
            "le",
            "ge",
            "lt",
            "gt",
            "neg",
            "pos",
            "mul",
            "add",
            "sub",
            "floordiv",
            "mod",
            "truediv",
            "and_",
            "or_",
            "rshift",
            "pow",
            "lshift",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("trunc", "floor", "ceil", "sqrt")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_not", "sym_int", "sym_float", "sym_ite", "sym_max", "sym_min")
    },
    "torch.sym_sqrt": math.sqrt,
    "torch._sym_sqrt": math.sqrt,
}


def _same_mode(_: bool, graph: "PlainGraph", *args: Any) -> list[Any]:
    return graph(*args)  # nothing here records gradients


def _autocast(
    device: str, dtype: Any, enabled: bool, cached: Any, graph: "PlainGraph", *args: Any
) -> list[Any]:
    with torch.autocast(device, dtype, enabled, cached):
        return graph(*args)


def _cond(chosen: Any, yes: "PlainGraph", no: "PlainGraph", args: Sequence[Any] = ()) -> list[Any]:
    return yes(*args) if chosen else no(*args)


_GRAPH_FUNCTIONS: dict[str, Callable[..., list[Any]]] = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": _same_mode,
    "torch.ops.higher_order.wrap_with_autocast": _autocast,
    "torch.ops.higher_order.cond": _cond,
}


@dataclass(frozen=True)
class _Slot:
    """Stands for the value with an index in the list of values while the graph is called."""

    number: int


@dataclass
class _Step:
    """An operator, its arguments with slots for computed values, and the slots of its results."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]
    is_tuple: bool
    """Whether the operator returns several results, even if one of them is named."""
    done_with: list[int] = field(default_factory=list)
    """Values that no later step needs."""


class PlainGraph:
    """A graph, of its JSON, that can be called; NotPlain: an operator or a value is not plain.

    `known`: tensors for some inputs, by name.
    """

    def __init__(self, graph: object, known: Mapping[str, Tensor]) -> None:
        fields = _dict(graph, "graph")
        self._slots: dict[str, int] = {}
        self._start: list[Any] = []
        self._inputs = []
        for argument in _items(fields.get("inputs")):
            name = _name_of(argument)
            number = self._new(name)
            if name in known:
                self._start[number] = known[name]
            else:
                self._inputs.append(number)
        kept = set(self._slots.values()) - set(self._inputs)
        self._steps = [self._step(_dict(node, "node")) for node in _items(fields.get("nodes"))]
        self._outputs = [self._value(_dict(one, "output")) for one in _items(fields.get("outputs"))]
        self._release(kept)
        self._tried = set[tuple[Any, ...]]()

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def __call__(self, *args: Any) -> list[Any]:
        """The outputs of the graph; InputError: a step would make a tensor that no such network makes."""
        if len(args) != len(self._inputs):
            raise ValueError(f"the graph takes {len(self._inputs)} inputs, got {len(args)}")
        values = self._start.copy()
        for number, value in zip(self._inputs, args, strict=True):
            values[number] = value
        shapes = tuple(getattr(one, "shape", None) for one in args)
        most = 0 if shapes in self._tried else max(_MOST_BYTES, _MOST_TIMES * _bytes_in(values))
        for step in self._steps:
            given = [_filled(part, values) for part in step.args]
            named = {name: _filled(part, values) for name, part in step.kwargs.items()}
            if most:
                _require_plausible(step.function, given, named, most)
            result = step.function(*given, **named)
            _store(step.results, result if step.is_tuple else (result,), values)
            for number in step.done_with:
                values[number] = None
        self._tried.add(shapes)
        return [_filled(part, values) for part in self._outputs]

    # ------------------------------------------------------------ reading

    def _new(self, name: str) -> int:
        if name in self._slots:
            raise NotPlain(f"the name {name[:80]!r} is there twice")
        self._slots[name] = len(self._start)
        self._start.append(None)
        return self._slots[name]

    def _step(self, node: dict[str, Any]) -> _Step:
        target = node.get("target")
        if not isinstance(target, str):
            raise NotPlain("an operator has no name")
        takes_graphs = target in _GRAPH_FUNCTIONS
        function = (
            _GRAPH_FUNCTIONS.get(target) or _NUMBER_FUNCTIONS.get(target) or _operator(target)
        )
        args = list[Any]()
        kwargs = dict[str, Any]()
        for argument in _items(node.get("inputs")):
            fields = _dict(argument, "input")
            value = self._value(_dict(fields.get("arg"), "argument"), graphs=takes_graphs)
            if fields.get("kind") == 2:
                kwargs[_text(fields.get("name"))] = value
            else:
                args.append(value)
        outputs = _items(node.get("outputs"))
        results = [self._result(_dict(one, "output")) for one in outputs]
        lists_alone = len(results) == 1 and isinstance(results[0], list)
        is_tuple = len(results) != 1 or takes_graphs
        if lists_alone and takes_graphs:
            results = results[0]
        return _Step(function, args, kwargs, results if outputs else [], is_tuple and bool(outputs))

    def _result(self, output: dict[str, Any]) -> Any:
        """The destination of a result: a slot, a list of slots, or None."""
        kind, value = _only(output)
        if kind == "as_none":
            return None
        if kind in ("as_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._result({_LISTS[kind]: one}) for one in _items(value)]
        return _Slot(self._new(_name_of(output)))

    def _value(self, argument: dict[str, Any], *, graphs: bool = False) -> Any:
        """An argument: a constant, a slot, or a list that may hold slots."""
        kind, value = _only(argument)
        if kind == "as_graph" and graphs:
            return PlainGraph(_dict(value, kind).get("graph"), {})
        if kind in _LISTS:
            return [self._value({_LISTS[kind]: one}) for one in _items(value)]
        if kind == "as_optional_tensors":
            return [self._value(_dict(one, kind)) for one in _items(value)]
        if kind == "as_optional_tensor":
            return self._value(_dict(value, kind))
        if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
            fields = _dict(value, kind)
            name = fields.get("name", fields.get("as_name"))
            if name is None and kind != "as_tensor":
                return self._value(fields)
            known = _text(name)
            if known not in self._slots:
                raise NotPlain(f"{known[:80]!r} is used before it is computed")
            return _Slot(self._slots[known])
        return _constant(kind, value)

    def _release(self, kept: set[int]) -> None:
        """Note after which step a value is not needed anymore; weights stay."""
        seen = kept | set(_slots_in(self._outputs))
        for step in reversed(self._steps):
            used = {
                *_slots_in(step.args),
                *_slots_in(list(step.kwargs.values())),
                *_slots_in(step.results),
            }
            step.done_with = sorted(used - seen)
            seen |= used


_LISTS = {
    "as_ints": "as_int",
    "as_floats": "as_float",
    "as_bools": "as_bool",
    "as_strings": "as_string",
    "as_tensors": "as_tensor",
    "as_sym_ints": "as_sym_int",
    "as_sym_floats": "as_sym_float",
    "as_sym_bools": "as_sym_bool",
    "as_int_lists": "as_ints",
    "as_float_lists": "as_floats",
    "as_nested_tensors": "as_tensors",
}


def plain_graph(archive: PlainArchive) -> PlainGraph:
    """An archive's graph with its weights, for the traced model's inputs; NotPlain as there."""
    version = _dict(archive.program.get("schema_version"), "schema_version")
    if version.get("major") != _MAJOR:
        raise NotPlain(f"its schema is {str(version.get('major'))[:20]}, and {_MAJOR} is read here")
    module = _dict(archive.program.get("graph_module"), "graph_module")
    signature = _dict(module.get("signature"), "signature")
    known: dict[str, Tensor] = {}
    for spec in _items(signature.get("input_specs")):
        kind, fields = _only(_dict(spec, "input"))
        if kind == "user_input":
            continue
        field_, tensors = _STORED.get(kind, ("", "weights"))
        name = _dict(fields, kind).get(field_)
        stored = getattr(archive, tensors)
        if kind == "buffer" and fields.get("persistent") is False:
            stored = archive.constants
        if not isinstance(name, str) or name not in stored:
            raise NotPlain(f"an input of the graph is {kind[:80]}, whose tensor is not there")
        known[_text(_dict(fields.get("arg"), "arg").get("name"))] = stored[name]
    for spec in _items(signature.get("output_specs")):
        kind, _ = _only(_dict(spec, "output"))
        if kind != "user_output":
            raise NotPlain(f"an output of the graph is {kind[:80]}: it changes what it holds")
    return PlainGraph(module.get("graph"), known)


_STORED = {
    "parameter": ("parameter_name", "weights"),
    "buffer": ("buffer_name", "weights"),
    "tensor_constant": ("tensor_constant_name", "constants"),
}


def _operator(target: str) -> Callable[..., Any]:
    """An operator of torch on tensors and numbers; none that opens a file or calls an object."""
    matched = _ATEN.fullmatch(target)
    inner = matched is not None and matched[1].startswith("_") and matched[1] not in _INNER
    if matched is None or inner or matched[1] in _FORBIDDEN:
        raise NotPlain(f"it calls {target[:80]!r}, which is no operator on tensors alone")
    packet: Any = None
    with contextlib.suppress(AttributeError):
        packet = getattr(torch.ops.aten, matched[1], None)
    # Other attributes of the namespace or of an operator have other types.
    if type(packet) is not type(torch.ops.aten.add) or matched[2] not in packet.overloads():
        raise NotPlain(f"this torch has no operator {target[:80]!r}")
    overload: Callable[..., Any] = getattr(packet, matched[2])
    schema: Any = overload._schema  # type: ignore[attr-defined]
    if _NO_TENSOR.search(
        " ".join(f"{argument.type} {argument.name}" for argument in schema.arguments)
    ):
        raise NotPlain(f"it calls {target[:80]!r}, which takes more than tensors and numbers")
    return overload


def _constant(kind: str, value: Any) -> Any:
    if kind == "as_none":
        return None
    if kind in _PLAIN and type(value) in _PLAIN[kind]:
        return value
    if kind == "as_scalar_type":
        return dtype_of(value)
    if kind == "as_memory_format" and type(value) is int and value in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[value]
    if kind == "as_layout" and value == _STRIDED:
        return torch.strided
    if kind == "as_device" and _dict(value, kind).get("type") == "cpu":
        return torch.device("cpu")
    if kind == "as_complex":
        fields = _dict(value, kind)
        return complex(
            _constant("as_float", fields.get("real")), _constant("as_float", fields.get("imag"))
        )
    if kind == "as_float" and value in _FLOAT_WORDS:
        return float(value)
    raise NotPlain(f"an argument is {kind[:40]} {str(value)[:80]!r}")


_PLAIN: dict[str, tuple[type, ...]] = {
    "as_int": (int,),
    "as_float": (float, int),
    "as_bool": (bool,),
    "as_string": (str,),
}
_FLOAT_WORDS = ("Infinity", "-Infinity", "NaN")  # as torch writes floats that JSON lacks


def _require_plausible(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], most: int
) -> None:
    """InputError if an operator would make more than `most` bytes: it is tried on tensors without content."""
    if type(function) is not _OPERATOR:
        return
    named = {name: _without_content(value) for name, value in kwargs.items()}
    if any(one.name == "device" for one in function._schema.arguments):
        named["device"] = torch.device("meta")
    try:
        made = function(*_without_content(args), **named)
    except (
        Exception
    ) as error:  # the size depends on the content, as that of nonzero: at most the input's
        if "repeat_interleave" in str(function):
            raise InputError(
                f"the graph calls {function}, whose size is not known before\nExport the model without it"
            ) from error
        return
    size = _bytes_in(made if isinstance(made, tuple) else [made])
    if size > most:
        raise InputError(
            f"the graph makes {size / 2**30:.1f} GiB in one step, by {function}\n"
            "A network does not: the file is damaged, or made to fill the memory"
        )


def _without_content(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.to("meta")
    if isinstance(part, torch.device):
        return torch.device("meta")
    return [_without_content(one) for one in part] if isinstance(part, list) else part


def _bytes_in(parts: Iterable[Any]) -> int:
    return sum(one.nbytes for one in parts if isinstance(one, Tensor))


def _filled(part: Any, values: list[Any]) -> Any:
    kind = type(part)
    if kind is _Slot:
        return values[part.number]
    return [_filled(one, values) for one in part] if kind is list else part


def _store(targets: Sequence[Any], results: Any, values: list[Any]) -> None:
    for target, result in zip(targets, results, strict=False):
        if isinstance(target, _Slot):
            values[target.number] = result
        elif isinstance(target, list):
            _store(target, result, values)


def _slots_in(part: Any) -> list[int]:
    if isinstance(part, _Slot):
        return [part.number]
    return [number for one in part for number in _slots_in(one)] if isinstance(part, list) else []


def _name_of(argument: object) -> str:
    kind, value = _only(_dict(argument, "value"))
    if kind not in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
        raise NotPlain(f"a value of the graph is {kind[:40]}")
    fields = _dict(value, kind)
    return _text(fields.get("name", fields.get("as_name")))


def _only(union: dict[str, Any]) -> tuple[str, Any]:
    if len(union) != 1:
        raise NotPlain("a value of the graph is not of one kind")
    return next(iter(union.items()))


def _dict(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotPlain(f"its {what} is no object")
    return value


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NotPlain("a list of the graph is missing")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise NotPlain("a name of the graph is no text")
    return value
