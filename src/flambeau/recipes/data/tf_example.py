"""tf.train.Example: named lists of bytes, floats or integers, without TensorFlow or protobuf.

tf.train.Example：带名字的字节串、浮点数或整数列表，不需要 TensorFlow 或 protobuf。

Source: TensorFlow `example.proto`, `feature.proto`; encoding: protobuf.dev/programming-guides/encoding.
Example {features = 1}, Features {map<string, Feature> feature = 1}, an entry {key = 1, value = 2},
Feature {oneof: bytes_list = 1, float_list = 2, int64_list = 3}, each list {repeated value = 1}.

Not for tf.train.SequenceExample, and not for other messages.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

BytesLike = bytes | bytearray | memoryview  # and other types that memoryview() takes

_VARINT, _FIXED64, _BYTES, _GROUP, _END, _FIXED32 = range(6)
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_MAX_DEPTH = 100  # of groups, as in protobuf
_MAX_TAG = 0xFFFFFFFF

# Number, wire type, value of a varint, start and end of the content without tag and length. A plain tuple: an
# Example has some fifty fields, and a named tuple would double the time per field.
_Field = tuple[int, int, int, int, int]


def parse_example(record: BytesLike) -> dict[str, list[bytes] | Tensor]:
    """Parse the features of a serialized Example, in stored order.

    Returns:
        By name: a list of bytes (empty without a value), or a (N,) float32 or int64 CPU tensor.

    Raises:
        ValueError: not an Example; the message names the byte.

    Example:
        >>> features = parse_example(build_example({"image": b"abc", "label": 7}))
        >>> features["image"], features["label"]
        ([b'abc'], tensor([7]))
    """
    data = record if isinstance(record, bytes) else memoryview(record).tobytes()
    features: dict[str, list[bytes] | Tensor] = {}
    for features_start, features_end in _messages(data, 0, len(data), 1):
        for start, end in _messages(data, features_start, features_end, 1):
            name = ""
            values = []
            for number, wire, _, begin, stop in _fields(data, start, end):
                if number == 1 and wire == _BYTES:
                    name = _text(data, begin, stop)
                elif number == 2 and wire == _BYTES:
                    values.append((begin, stop))  # several are merged, as protobuf does
            features[name] = _parse_feature(data, values)
    return features


def build_example(features: Mapping[str, Any]) -> bytes:
    """Serialize an Example, features in the given order.

    Args:
        features: by name one or several values of one kind: bytes-like; int or bool, of 64 bits; float, or
            float and int. Tensors and arrays are flattened in row-major order.

    Raises:
        TypeError: a value is text or of another kind, or kinds are mixed.
        ValueError: an integer beyond 64 bits, or a float beyond float32.

    Example:
        >>> build_example({"index": [1, -1]}).hex()
        '0a1a0a180a05696e646578120f1a0d0a0b01ffffffffffffffffff01'
    """
    entries = []
    for name, values in features.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a feature is text, got {name!r}")
        try:
            kind, items = _build_list(values)
        except (TypeError, ValueError, OverflowError) as error:
            wrong = TypeError if isinstance(error, TypeError) else ValueError
            raise wrong(f"feature {name!r}: {error}") from error
        feature = _message(kind, items)
        entries.append(_message(1, _message(1, name.encode()) + _message(2, feature)))
    return _message(1, b"".join(entries))


def _error(offset: int, reason: str) -> ValueError:
    return ValueError(f"byte {offset} of the Example: {reason}")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at < end and data[at] < 128:
        return data[at], at + 1
    value = 0
    for count, byte in enumerate(data[at : min(at + 10, end)]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at + count + 1
    raise _error(at, "truncated varint" if end - at < 10 else "a varint of more than 10 bytes")


def _fields(data: bytes, at: int, end: int) -> Iterator[_Field]:
    """The fields of the message in data[at:end]; groups are skipped."""
    groups: list[int] = []
    while at < end:
        begin = at
        tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at, end)
        number = tag >> 3
        wire = tag & 7
        value = 0
        if number == 0 or tag > _MAX_TAG or at - begin > 5:
            raise _error(begin, f"no field has the tag {tag}")
        start = at
        if wire == _BYTES:
            size, start = _varint(data, at, end)
            at = start + size
        elif wire == _VARINT:
            value, at = _varint(data, at, end)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        elif wire == _GROUP and len(groups) < _MAX_DEPTH:
            groups.append(number)
        elif wire == _END and groups and groups[-1] == number:
            groups.pop()
            continue
        else:
            raise _error(begin, f"field {number} of wire type {wire} cannot stand here")
        if at > end:
            raise _error(begin, f"truncated: field {number} ends at {at}, its message at {end}")
        if not groups:
            yield number, wire, value, start, at
    if groups:
        raise _error(end, f"truncated: the group of field {groups[-1]} has no end")


def _messages(data: bytes, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    for field_number, wire, _, content_start, content_end in _fields(data, start, end):
        if field_number == number and wire == _BYTES:
            yield content_start, content_end


def _text(data: bytes, start: int, end: int) -> str:
    try:
        return data[start:end].decode()
    except UnicodeDecodeError as error:
        raise _error(start, f"the name of a feature is not UTF-8: {error}") from error


def _parse_feature(data: bytes, parts: Iterable[tuple[int, int]]) -> list[bytes] | Tensor:
    kind = _BYTES_LIST
    values = list[_Field]()
    for part in parts:
        for number, wire, _, start, end in _fields(data, *part):
            if number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) and wire == _BYTES:
                if number != kind:
                    kind = number  # if there are several kinds, the last one counts
                    values = []
                values += [field for field in _fields(data, start, end) if field[0] == 1]
    if kind == _FLOAT_LIST:
        return _floats(data, values)
    if kind == _INT64_LIST:
        return _integers(data, values)
    return [data[start:end] for _, wire, _, start, end in values if wire == _BYTES]


def _floats(data: bytes, values: Iterable[_Field]) -> Tensor:
    pieces = []
    for _, wire, _, start, end in values:
        if wire == _BYTES and (end - start) % 4:
            raise _error(start, f"{end - start} bytes of floats, not 4 x n")
        if wire in (_BYTES, _FIXED32):
            pieces.append(data[start:end])
    raw = b"".join(pieces)
    numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _integers(data: bytes, values: Iterable[_Field]) -> Tensor:
    numbers = []
    for _, wire, single, start, end in values:
        if wire == _VARINT:
            numbers.append(single)
        at = start if wire == _BYTES else end
        while at < end:
            number, at = _varint(data, at, end)
            numbers.append(number)
    signed = [number - (number >> 63 << 64) for number in numbers]
    return torch.tensor(signed, dtype=torch.int64, device="cpu")


def _build_list(values: Any) -> tuple[int, bytes]:
    """The number and the content of the list that holds the values."""
    if isinstance(values, str):
        raise TypeError("a feature holds bytes, not text: text.encode()")
    kind = _BYTES_LIST  # of an empty list
    if hasattr(values, "reshape"):
        floating, integral = (word in str(values.dtype) for word in ("float", "int"))
        kind = _FLOAT_LIST if floating else _INT64_LIST if integral else kind
        values = values.reshape(-1).tolist()
    values = [values] if isinstance(values, BytesLike | Real) else list(values)
    if not values:
        return kind, b""
    if all(isinstance(value, BytesLike) for value in values):
        return _BYTES_LIST, b"".join(_message(1, bytes(value)) for value in values)
    if all(isinstance(value, Integral) for value in values):
        for value in values:
            if not -(1 << 63) <= value < 1 << 63:
                raise ValueError(f"{value} is beyond 64 bits")
        return _INT64_LIST, _message(1, b"".join(map(_build_varint, map(int, values))))
    if all(isinstance(value, Real) for value in values):
        return _FLOAT_LIST, _message(1, struct.pack(f"<{len(values)}f", *map(float, values)))
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise TypeError(f"a feature holds bytes, or integers, or floats, got {kinds}")


def _build_varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _message(number: int, content: bytes) -> bytes:
    return _build_varint(number << 3 | _BYTES) + _build_varint(len(content)) + content
