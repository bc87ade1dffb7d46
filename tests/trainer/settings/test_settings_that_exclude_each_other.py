"""Settings of which one rules the other out."""

from typing import Any

import pytest

from flambeau.errors import InputError
from flambeau.trainer.settings.settings import Settings


@pytest.mark.parametrize(
    ("chosen", "what"),
    [
        ({"parts": 4, "sync_bn": True, "compile": "default"}, r"parts = 4 and compile = 'default': with"),
        ({"parts": 4, "shard": "fsdp"}, r"parts = 4: with shard = 'fsdp' gradients are added in"),
        ({"parts": 4, "batch_size": "auto"}, r"parts = 4 .* batch_size = 'auto' finds one"),
        ({"portable_bits": 2, "optimizer": "rmsprop"}, r"optimizer = 'rmsprop' .*; use 'sgd' or 'adam'"),
        ({"portable_bits": 2, "precision": "bf16"}, r"precision = 'bf16' the bits depend .*; use 'fp32'"),
        ({"portable_bits": 2, "device": "cuda"}, r"device = 'cuda' the bits depend .*; use 'cpu'"),
        ({"portable_bits": 2, "compile": "default"}, r"portable_bits = 2: with compile = 'default'"),
        ({"portable_bits": 2, "parts": 2}, r"portable_bits = 2: with parts = 2 .*; leave parts out"),
        ({"shard": "fsdp", "compression": "bf16"}, r"compression = 'bf16' has no effect with shard"),
        ({"shard": "fsdp", "qat": True, "weights": "a"}, r"shard = 'fsdp' and qat do not go together"),
        ({"shard": "fsdp", "optimizer": "muon"}, r"shard = 'fsdp' leaves each process a piece"),
    ],
)  # fmt: skip
def test_two_that_do_not_go_together_are_named(chosen: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        Settings(**chosen)


def test_parts_go_with_what_is_equal_for_any_number_of_processes() -> None:
    chosen = {"ema": 0.9, "clip_norm": 1.0, "precision": "fp16", "compile": "default", "mixup": 0.2}
    assert Settings(parts=4, **chosen).parts == 4
