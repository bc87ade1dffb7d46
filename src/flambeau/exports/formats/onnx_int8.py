"""int8 by ONNX Runtime: QDQ with measured ranges, or only the weights.

The resizing and the last softmax are not quantized.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.exports.formats.onnx_file import require

_BATCH = 8  # images per call while ranges are measured, which keeps every tensor of the network


def quantize_static(source: Path, target: Path, images: Tensor) -> None:
    """Weights and activations as int8, per channel, by ranges of images (N, S, S, C)."""
    quantization = _quantization()
    with _prepared(source) as prepared:
        quantization.quantize_static(
            str(prepared),
            str(target),
            _reader(quantization, images),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=_unquantized_nodes(prepared),
            # Logits of 256 levels tie too often: 90 predictions of 10,000 changed with them, 67 without
            # (ResNet-18 on Fashion-MNIST).
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
        )


def quantize_dynamic(source: Path, target: Path) -> None:
    """Weights of linear layers as int8; their inputs are quantized at run time."""
    quantization = _quantization()
    with _prepared(source) as prepared:
        quantization.quantize_dynamic(
            str(prepared),
            str(target),
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_exclude=_unquantized_nodes(prepared),
        )


def _quantization() -> Any:
    require("onnx")
    return require("onnxruntime.quantization")


@contextlib.contextmanager
def _prepared(source: Path) -> Iterator[Path]:
    """The file with inferred shapes and folded constants, while the context is open."""
    shapes = require("onnxruntime.quantization.shape_inference")
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared.onnx")
        shapes.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        yield prepared


def _unquantized_nodes(path: Path) -> list[str]:
    """Names of the nodes with other types than float32, and of those that decode the logits.

    With 256 levels, most probabilities of many classes would be 0.
    """
    onnx = require("onnx")
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    types |= {constant.name: constant.data_type for constant in graph.initializer}
    other = (onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64, onnx.TensorProto.UINT8)
    decoded = {"logits"}
    for node in graph.node:  # each follows those that it depends on
        if not decoded.isdisjoint(node.input):
            decoded.update(node.output)
    return [
        node.name
        for node in graph.node
        if not decoded.isdisjoint(node.input)
        or any(types.get(name) in other for name in [*node.input, *node.output][:2])
    ]


def _reader(quantization: Any, images: Tensor) -> Any:
    size = torch.tensor(images.shape[1:3]).numpy()

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(images.split(_BATCH))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"pixels": batch.numpy(), "full_size": size}

    return Reader()
