from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau.recipes.tensors import check_shapes as module
from flambeau.recipes.tensors.check_shapes import check_shapes

X = torch.zeros(8, 3, 32, 16)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("N 3 H W", {"N": 8, "H": 32, "W": 16}),
        ("8 3 32 16", {}),
        ("_ C _ _", {"C": 3}),
        ("...", {}),
        ("N ...", {"N": 8}),
        ("... H W", {"H": 32, "W": 16}),
        ("N ... W", {"N": 8, "W": 16}),
        ("N C H W ...", {"N": 8, "C": 3, "H": 32, "W": 16}),
        ("  batch 3\theight_in width_2 ", {"batch": 8, "height_in": 32, "width_2": 16}),
    ],
)
def test_patterns(pattern: str, sizes: dict[str, int]) -> None:
    assert check_shapes(images=(X, pattern)) == sizes
    assert check_shapes(a=(X, pattern), b=(X, pattern)) == sizes


def test_scalars_and_empty_tensors() -> None:
    assert check_shapes(loss=(torch.tensor(1.0), "")) == {}
    assert check_shapes(loss=(torch.tensor(1.0), "...")) == {}
    assert check_shapes(boxes=(torch.zeros(0, 4), "K 4")) == {"K": 0}
    assert check_shapes() == {}


def test_dtypes_and_devices() -> None:
    on_meta = torch.zeros(2, device="meta")
    check_shapes(x=(X, "...", torch.float32, "cpu"), y=(on_meta, "N", torch.device("meta")))
    with pytest.raises(TypeError, match=r"^x has dtype torch.float32, expected torch.int64$"):
        check_shapes(x=(X, "...", torch.int64))
    with pytest.raises(ValueError, match=r"^y is on meta, expected cpu$"):
        check_shapes(y=(on_meta, "N", "cpu"))
    with pytest.raises(ValueError, match=r"^x is on cpu, expected cuda:1$"):
        check_shapes(x=(X, "...", "cuda:1"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"images": (torch.zeros(8, 1, 32, 32), "N 3 H W")},
            "images has shape (8, 1, 32, 32), expected N 3 H W: dimension 1 is 1, not 3",
        ),
        (
            {"images": (X, "N 3 H W"), "targets": (torch.zeros(7), "N")},
            "targets has shape (7,), expected N: N is 8 in images and 7 in targets",
        ),
        (
            {"prediction": (torch.zeros(4), "N"), "target": (torch.zeros(4, 1), "N")},
            "target has shape (4, 1), expected N: 2 dimensions, not 1",
        ),
        ({"x": (X, "N N H W")}, "N is 8 in an earlier dimension and 3 in dimension 1"),
        ({"x": (torch.zeros(2), "N ... H W")}, "1 dimension, not 3 or more"),
        ({"loss": (torch.zeros(1), "")}, "loss has shape (1,), expected none: 1 dimension, not 0"),
        ({"x": (X, "N,3,H,W")}, "'N,3,H,W' in 'N,3,H,W' is neither a name"),
        ({"x": (X, "N 3 (H W)")}, "'(H' in 'N 3 (H W)' is neither"),
        ({"x": (X, "N -1 H W")}, "'-1' in 'N -1 H W' is neither"),
        ({"x": (X, "... N ...")}, "has more than one ..."),
    ],
)
def test_messages(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_shapes(**tensors)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "got"),
    [(X, "Tensor"), ((X,), "Tensor"), (([1], "N"), "list, str"), ("N", "str")],
)
def test_what_is_no_pair_is_refused(value: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"x must be \(tensor, 'N 3 H W'\), got {got}$"):
        check_shapes(x=value)


def test_optimized_python_keeps_the_check() -> None:
    """As `python -O` compiles it."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "optimized"}
    exec(compile(source + "\nassert False, 'this is stripped'", "a.py", "exec", optimize=1), names)
    with pytest.raises(
        ValueError, match=r"x has shape \(2,\), expected 3: dimension 0 is 2, not 3"
    ):
        names["check_shapes"](x=(torch.zeros(2), "3"))


def loss(images: Tensor, targets: Tensor) -> Tensor:
    sizes = check_shapes(images=(images, "N 3 ... W", torch.float32, "cpu"), targets=(targets, "N"))
    return (images.mean((1, 2, 3)) - targets).sum() / sizes["N"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(dynamic: bool) -> None:
    compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=dynamic)
    torch.compiler.reset()
    for size in (8, 5):
        x, y = torch.randn(size, 3, 4, 6), torch.randn(size)
        torch.testing.assert_close(compiled(x, y), loss(x, y))


def test_the_graph_holds_no_trace_of_it() -> None:
    torch.compiler.reset()
    x, y = torch.randn(8, 3, 4, 6), torch.randn(8)
    checked = torch._dynamo.explain(loss)(x, y)
    plain = torch._dynamo.explain(lambda x, y: (x.mean((1, 2, 3)) - y).sum() / len(x))(x, y)
    assert (checked.graph_count, checked.graph_break_count) == (1, 0)
    assert checked.op_count == plain.op_count


def test_a_wrong_shape_is_refused_in_compiled_code_too() -> None:
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager")
    with pytest.raises(ValueError, match="N is 8 in images and 7 in targets"):
        compiled(torch.randn(8, 3, 4, 6), torch.randn(7))
