"""tf.train.Example against protobuf's own parser, bytes of the package tfrecord, and every bad input."""

import random
import re
import struct
import time
from typing import Any

import numpy as np
import pytest
import torch

from flambeau.recipes.data.tf_example import build_example, parse_example

Plain = dict[str, list[Any]]


def plain(features: dict[str, list[bytes] | torch.Tensor]) -> Plain:
    """With lists in place of tensors, whose kinds are checked."""
    out: Plain = {}
    for name, values in features.items():
        if isinstance(values, torch.Tensor):
            assert values.dtype in (torch.int64, torch.float32)
            assert (values.ndim, values.device.type) == (1, "cpu")
            out[name] = values.tolist()
        else:
            assert all(type(value) is bytes for value in values)
            out[name] = values
    return out


def message(number: int, content: bytes) -> bytes:
    """A length-delimited field of a small number and a short content."""
    assert number < 16
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def example(*entries: bytes) -> bytes:
    return message(1, b"".join(message(1, entry) for entry in entries))


def feature(name: bytes, content: bytes) -> bytes:
    return message(1, name) + message(2, content)


# ---- known bytes ----------------------------------------------------------------------------------

# By the package tfrecord 1.14.6, which uses protobuf.
PEER = bytes.fromhex(
    "0a350a110a056c6162656c120812060a040000803f0a100a05696d61676512070a050a036162630a0e0a05696e646578"
    "12051a030a0107"
)


def test_an_example_of_the_package_tfrecord() -> None:
    features = parse_example(PEER)
    assert plain(features) == {"label": [1.0], "image": [b"abc"], "index": [7]}
    assert list(features) == ["label", "image", "index"]
    torch.testing.assert_close(features["label"], torch.tensor([1.0]), rtol=0, atol=0)
    torch.testing.assert_close(features["index"], torch.tensor([7]), rtol=0, atol=0)
    assert build_example(features) == PEER
    assert plain(parse_example(memoryview(PEER))) == plain(parse_example(bytearray(PEER)))


VALUES: list[tuple[str, bytes, list[Any]]] = [
    (
        "bytes",
        message(1, message(1, b"a") + message(1, b"") + message(1, b"\xff")),
        [b"a", b"", b"\xff"],
    ),
    ("no bytes", message(1, b""), []),
    ("packed floats", message(2, message(1, struct.pack("<3f", 1, -2, 0.5))), [1.0, -2.0, 0.5]),
    ("single floats", message(2, b"\x0d\0\0\x80\x3f\x0d\0\0\0\xc0"), [1.0, -2.0]),
    (
        "floats of both kinds",
        message(2, b"\x0d\0\0\x80\x3f" + message(1, struct.pack("<f", 3))),
        [1.0, 3.0],
    ),
    ("no floats", message(2, b""), []),
    ("packed integers", message(3, message(1, b"\x00\x7f\x80\x01\x96\x01")), [0, 127, 128, 150]),
    ("single integers", message(3, b"\x08\x05\x08\x96\x01"), [5, 150]),
    (
        "integers of both kinds",
        message(3, b"\x08\x05" + message(1, b"\x06\x07") + b"\x08\x08"),
        [5, 6, 7, 8],
    ),
    ("-1", message(3, message(1, b"\xff" * 9 + b"\x01")), [-1]),
    ("the least integer", message(3, message(1, b"\x80" * 9 + b"\x01")), [-(2**63)]),
    ("the greatest integer", message(3, message(1, b"\xff" * 8 + b"\x7f")), [2**63 - 1]),
    ("1 in ten bytes", message(3, message(1, b"\x81" + b"\x80" * 8 + b"\x00")), [1]),
    ("lists that are merged", message(3, b"\x08\x05") + message(3, b"\x08\x06"), [5, 6]),
    ("the last of two kinds", message(3, b"\x08\x05") + message(1, message(1, b"x")), [b"x"]),
    ("nothing", b"", []),
]


@pytest.mark.parametrize(
    ("content", "expected"), [v[1:] for v in VALUES], ids=[v[0] for v in VALUES]
)
def test_each_way_to_write_values(content: bytes, expected: list[Any]) -> None:
    features = parse_example(example(feature(b"x", content)))
    assert plain(features) == {"x": expected}


def test_empty_tensors_keep_their_kind() -> None:
    given = {"f": torch.zeros(0), "i": torch.zeros(0, dtype=torch.int64), "b": []}
    features = parse_example(build_example(given))
    assert {name: getattr(v, "dtype", list) for name, v in features.items()} == {
        "f": torch.float32,
        "i": torch.int64,
        "b": list,
    }
    features = parse_example(build_example({"f": np.zeros(0), "i": np.zeros(0, np.uint8)}))
    assert [getattr(v, "dtype", list) for v in features.values()] == [torch.float32, torch.int64]
    for number, kind in ((1, list), (2, torch.float32), (3, torch.int64)):
        (values,) = parse_example(example(feature(b"x", message(number, b"")))).values()
        assert getattr(values, "dtype", list) == kind


def test_unknown_fields_are_passed_over() -> None:
    known = feature(b"x", message(3, b"\x08\x05"))
    unknown = [
        b"\x78\x96\x01",  # field 15, varint
        b"\x79" + bytes(8),  # 64 bits
        b"\x7a\x03abc",  # length
        b"\x7d" + bytes(4),  # 32 bits
        b"\x7b\x08\x01\x73\x74\x7c",  # a group with a field and a group in it
        b"\x7b" + message(1, b"") + message(3, b"\x08\x06") + b"\x7c",  # a group with known fields
        b"\xf8\xff\xff\xff\x0f\x01",  # the greatest field number
        b"\x08\x01",  # fields 1 of another wire type than the known one
        b"\x0d" + bytes(4),
        b"\x09" + bytes(8),
        b"\x0b\x0c",
    ]
    for more in unknown:
        for record in (
            more + example(known) + more,
            message(1, more + message(1, known) + more),
            message(1, message(1, more + known + more)),
            example(feature(b"x", more + message(3, b"\x08\x05") + more)),
        ):
            assert plain(parse_example(record)) == {"x": [5]}, (more, record)


def test_the_rules_of_merging() -> None:
    five, six = (feature(b"x", message(3, b"\x08" + bytes([n]))) for n in (5, 6))
    assert plain(parse_example(example(five, six))) == {"x": [6]}
    assert plain(parse_example(example(five) + example(six))) == {"x": [6]}
    assert plain(parse_example(example(message(1, b"y") + five))) == {"x": [5]}
    twice = (
        message(1, b"x") + message(2, message(3, b"\x08\x05")) + message(2, message(3, b"\x08\x06"))
    )
    assert plain(parse_example(example(twice))) == {"x": [5, 6]}
    assert plain(parse_example(example(message(2, message(3, b"\x08\x05"))))) == {"": [5]}
    assert plain(parse_example(example(b""))) == {"": []}
    assert parse_example(b"") == parse_example(message(1, b"")) == {}


# ---- protobuf -------------------------------------------------------------------------------------


def peer_message() -> Any:
    """Example of TensorFlow's .proto files, as the package tfrecord has compiled it."""
    pytest.importorskip("tfrecord")
    from tfrecord import example_pb2

    return example_pb2.Example()


def peer_parse(data: bytes) -> Plain | None:
    """What protobuf makes of it; None for an error."""
    parsed = peer_message()  # skips the test where protobuf is missing
    from google.protobuf.message import DecodeError

    try:
        parsed.ParseFromString(data)
    except DecodeError:
        return None
    out: Plain = {}
    for name, content in parsed.features.feature.items():
        kind = content.WhichOneof("kind")
        out[name] = list(getattr(content, kind).value) if kind else []
    return out


def keeps_entries_unknown(data: bytes) -> bool:
    """A map entry with an unknown field is unknown as a whole to protobuf's upb, not so to its C++."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    parsed = peer_message()
    parsed.ParseFromString(data)
    return any(field.field_number == 1 for field in UnknownFieldSet(parsed.features))


def random_features(source: random.Random) -> dict[str, list[Any]]:
    def values() -> list[Any]:
        count = source.randrange(5)
        return source.choice(
            [
                [source.randbytes(source.randrange(9)) for _ in range(count)],
                [
                    source.getrandbits(source.randrange(1, 64)) * source.choice([1, -1])
                    for _ in range(count)
                ],
                [
                    struct.unpack("<f", struct.pack("<f", source.gauss(0, 99)))[0]
                    for _ in range(count)
                ],
            ]
        )

    names = source.sample(["", "a", "image/encoded", "ü" * 70, "z"], source.randrange(6))
    return {name: values() for name in names}


def test_protobuf_reads_what_is_built_and_we_what_it_builds() -> None:
    source = random.Random(0)
    for _ in range(500):
        features = random_features(source)
        built = build_example(features)
        assert peer_parse(built) == plain(parse_example(built)) == features
        peer = peer_message()
        for name, values in features.items():
            kinds = {bytes: "bytes_list", int: "int64_list", float: "float_list"}
            kind = kinds[type(values[0])] if values else "bytes_list"
            getattr(peer.features.feature[name], kind).value.extend(values)
        assert plain(parse_example(peer.SerializeToString())) == features
        if features and [] not in features.values():
            assert len(built) == peer.ByteSize()


def test_damaged_examples_are_what_protobuf_makes_of_them() -> None:
    source = random.Random(1)
    refused = read = 0
    for _ in range(6000):
        data = bytearray(build_example(random_features(source)))
        for _ in range(source.randrange(1, 4)):
            if data:
                byte = source.choice([source.randrange(256), 8, 10, 13, 18, 26, 0x80, 0xFF])
                data[source.randrange(len(data))] = byte
        expected = peer_parse(bytes(data))
        try:
            found = plain(parse_example(bytes(data)))
        except ValueError as error:
            assert expected is None, (data.hex(), str(error))
            assert re.match(r"byte \d+ of the Example: ", str(error))
            refused += 1
        else:
            assert expected is not None, data.hex()
            if not keeps_entries_unknown(bytes(data)):
                assert repr(found) == repr({name: expected[name] for name in found}), data.hex()
                assert len(found) == len(expected)
                read += 1
    assert refused > 2000
    assert read > 1000


# ---- bad input ------------------------------------------------------------------------------------

MALFORMED = [
    (b"\x0a", 1, "truncated varint"),
    (b"\x0a\x05abc", 0, "truncated: field 1 ends at 7, its message at 5"),
    (
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        0,
        "truncated: field 1 ends at 18446744073709551626",
    ),
    (b"\x80" * 11, 0, "a varint of more than 10 bytes"),
    (b"\x78" + b"\x80" * 11, 1, "a varint of more than 10 bytes"),
    (b"\x78\x80", 1, "truncated varint"),
    (b"\x79" + bytes(7), 0, "truncated: field 15 ends at 9, its message at 8"),
    (b"\x7d" + bytes(3), 0, "truncated: field 15 ends at 5, its message at 4"),
    (b"\x00", 0, "no field has the tag 0"),
    (b"\x80\x80\x80\x80\x10\x00", 0, "no field has the tag 4294967296"),
    (b"\x8a\x80\x80\x80\x80\x00\x00", 0, "no field has the tag 10"),
    (b"\x7e", 0, "field 15 of wire type 6 cannot stand here"),
    (b"\x7f", 0, "field 15 of wire type 7 cannot stand here"),
    (b"\x7c", 0, "field 15 of wire type 4 cannot stand here"),
    (b"\x7b\x74", 1, "field 14 of wire type 4 cannot stand here"),
    (b"\x7b\x08\x01", 3, "truncated: the group of field 15 has no end"),
    (b"\x7b" * 101, 100, "field 15 of wire type 3 cannot stand here"),
    (example(feature(b"\xff", b"")), 6, "the name of a feature is not UTF-8: 'utf-8' codec"),
    (example(feature(b"x", message(2, message(1, b"abcde")))), 13, "5 bytes of floats, not 4 x n"),
    (example(feature(b"x", message(3, message(1, b"\x01\x80")))), 14, "truncated varint"),
    (b"\xff\xd8\xff\xe0\x00\x10JFIF", 0, "field 25427343 of wire type 7"),
    (b"\x89PNG\r\n\x1a\n", 0, "truncated: field 1281"),
]


@pytest.mark.parametrize(("data", "offset", "reason"), MALFORMED)
def test_malformed_examples_are_refused(data: bytes, offset: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^byte {offset} of the Example: {re.escape(reason)}"):
        parse_example(data)


def test_each_truncation_is_refused_or_lacks_features() -> None:
    features = {"image": b"abc", "label": [1, -1], "box": [0.5, 1.5]}
    data = build_example(features)
    for size in range(1, len(data)):
        with pytest.raises(ValueError, match=r"^byte \d+ of the Example: truncated"):
            parse_example(data[:size])


def test_hostile_examples_take_no_more_time_than_their_size() -> None:
    parts = 50_000
    floats = b"\x0d\0\0\x80\x3f" * parts
    lists = b"\x1a\x02\x08\x05" * parts  # a list for each integer
    start = time.perf_counter()
    for content, expected in ((b"\x12" + varint(len(floats)) + floats, 1.0), (lists, 5)):
        entry = message(1, b"x") + b"\x12" + varint(len(content)) + content
        features = b"\x0a" + varint(len(entry)) + entry
        values = parse_example(b"\x0a" + varint(len(features)) + features)["x"]
        assert isinstance(values, torch.Tensor)
        assert values.tolist() == [expected] * parts
    assert time.perf_counter() - start < 10  # 0.3 s here; were it quadratic: minutes


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_text_is_no_example() -> None:
    for wrong in ("text", 5, None):
        with pytest.raises(TypeError):
            parse_example(wrong)  # type: ignore[arg-type]


# ---- building -------------------------------------------------------------------------------------

KINDS = [
    (b"a", [b"a"]),
    (bytearray(b"a"), [b"a"]),
    (memoryview(b"abcd")[::2], [b"ac"]),
    ((b"a", bytearray(b"b")), [b"a", b"b"]),
    (np.array([b"ab", b"c"]), [b"ab", b"c"]),
    (7, [7]),
    (True, [1]),
    (range(3), [0, 1, 2]),
    ((n for n in (1, 2)), [1, 2]),
    ([1, False], [1, 0]),
    (np.int64(-3), [-3]),
    ([np.int32(-3), np.uint8(200), 5], [-3, 200, 5]),
    ([np.float32(0.5), 1], [0.5, 1.0]),
    (np.array([[1, 2], [3, 4]], np.uint8), [1, 2, 3, 4]),
    (np.array([2**63 - 1], np.uint64), [2**63 - 1]),
    (np.array([True, False]), [1, 0]),
    (torch.tensor(3), [3]),
    (torch.tensor([[1, 2], [3, 4]]).T, [1, 3, 2, 4]),
    (torch.tensor([True]), [1]),
    (0.5, [0.5]),
    ([1, 0.5], [1.0, 0.5]),
    (np.float32(0.1), [float(np.float32(0.1))]),
    (np.array([0.1]), [float(np.float32(0.1))]),
    (torch.tensor([0.5, 2], dtype=torch.bfloat16), [0.5, 2.0]),
    (torch.tensor([0.5], requires_grad=True), [0.5]),
    (float("inf"), [float("inf")]),
    ([], []),
]


@pytest.mark.parametrize(("given", "expected"), KINDS, ids=[str(i) for i in range(len(KINDS))])
def test_values_of_every_kind(given: object, expected: list[Any]) -> None:
    values = plain(parse_example(build_example({"x": given})))["x"]
    assert values == expected
    assert [type(value) for value in values] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ("text", TypeError, r"a feature holds bytes, not text: text\.encode\(\)"),
        (["text"], TypeError, "a feature holds bytes, or integers, or floats, got str"),
        ([b"a", 1], TypeError, "got bytes, int"),
        ([b"a", 1.5], TypeError, "got bytes, float"),
        (None, TypeError, "NoneType"),
        ([None], TypeError, "got NoneType"),
        ([[1], [2]], TypeError, "got list"),
        (1j, TypeError, "complex"),
        (np.array(["text"]), TypeError, "got str"),
        (2**63, ValueError, "9223372036854775808 is beyond 64 bits"),
        ([0, -(2**63) - 1], ValueError, "is beyond 64 bits"),
        (np.array([2**63], np.uint64), ValueError, "is beyond 64 bits"),
        (1e39, ValueError, "too large"),
        ([0.5, 10**400], ValueError, "too large"),
    ],
)
def test_values_that_are_refused(given: object, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=f"feature 'x y': .*{reason}"):
        build_example({"x y": given})


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the name of a feature is text, got b'image'"):
        build_example({b"image": b""})  # type: ignore[dict-item]


def test_the_defaults_of_torch_do_not_count() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            features = parse_example(PEER)
    finally:
        torch.set_default_dtype(before)
    assert plain(features) == {"label": [1.0], "image": [b"abc"], "index": [7]}
