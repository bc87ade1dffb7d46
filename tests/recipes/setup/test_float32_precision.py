"""The switches of TF32, read back through torch's own two families of getters."""

from collections.abc import Iterator

import pytest
import torch

from flambeau.recipes.setup.float32_precision import (
    float32_precision,
    float32_precision_as,
    set_float32_precision,
)

BACKENDS = torch.backends
DEFAULTS = {"matmul": "ieee", "convolution": "tf32", "rnn": "tf32"}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    with float32_precision_as("ieee"):
        pass
    assert float32_precision() == DEFAULTS
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.mkldnn.matmul.fp32_precision = "none"
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.cuda.matmul.fp32_precision = "none"
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    BACKENDS.cudnn.rnn.fp32_precision = "tf32"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_all_three_kinds_are_set(precision: str) -> None:
    set_float32_precision(precision)  # type: ignore[arg-type]
    assert float32_precision() == dict.fromkeys(DEFAULTS, precision)
    assert BACKENDS.cuda.matmul.fp32_precision == precision
    assert BACKENDS.cudnn.conv.fp32_precision == precision
    assert BACKENDS.cudnn.rnn.fp32_precision == precision


def all_switches() -> tuple[object, ...]:
    return (
        float32_precision(), BACKENDS.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision(),
        BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("before", [None, "highest", "high", "medium"])
def test_the_older_getters_agree(precision: str, before: str | None) -> None:
    """`torch.export` and `torch.compile` ask for them, and they raise where the families differ."""
    if before is not None:
        torch.set_float32_matmul_precision(before)
    switches = all_switches()
    with float32_precision_as(precision):  # type: ignore[arg-type]
        is_tf32 = precision == "tf32"
        assert BACKENDS.cuda.matmul.allow_tf32 is is_tf32
        assert BACKENDS.cudnn.allow_tf32 is is_tf32
        assert torch.get_float32_matmul_precision() == ("high" if is_tf32 else "highest")
        torch.export.export(torch.nn.Conv2d(1, 1, 1), (torch.ones(1, 1, 2, 2),))
    assert all_switches() == switches


def test_the_block_puts_back_what_was_there_also_after_an_error() -> None:
    with float32_precision_as("tf32"):
        assert float32_precision()["matmul"] == "tf32"
        with pytest.raises(KeyError), float32_precision_as("ieee"):
            assert set(float32_precision().values()) == {"ieee"}
            raise KeyError
        assert float32_precision() == dict.fromkeys(DEFAULTS, "tf32")
    assert float32_precision() == DEFAULTS
    assert BACKENDS.cuda.matmul.fp32_precision == "none"  # not merely what it amounts to


def test_the_setting_for_all_backends_is_seen_where_it_counts() -> None:
    BACKENDS.fp32_precision = "tf32"
    try:
        assert float32_precision()["matmul"] == "tf32"
        BACKENDS.cudnn.conv.fp32_precision = "ieee"
        assert float32_precision()["convolution"] == "ieee"
    finally:
        BACKENDS.fp32_precision = "none"


@pytest.mark.parametrize("word", ["fp32", "high", "", None])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="'ieee' or 'tf32'"):
        set_float32_precision(word)  # type: ignore[arg-type]
    assert float32_precision() == DEFAULTS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_a_gpu_follow() -> None:
    a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    errors = {}
    for precision in ("ieee", "tf32"):
        with float32_precision_as(precision):  # type: ignore[arg-type]
            errors[precision] = float((a @ b - exact).abs().max())
    assert errors["tf32"] > 20 * errors["ieee"]
