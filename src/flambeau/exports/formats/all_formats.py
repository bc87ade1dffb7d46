"""The formats by name."""

from flambeau.exports.formats.aot_inductor_file import (
    open_aot_inductor,
    require_compiler,
    write_aot_inductor,
)
from flambeau.exports.formats.classifier import ModelFormat
from flambeau.exports.formats.onnx_file import open_onnx, require_onnx, write_onnx
from flambeau.exports.formats.torch_export_file import (
    check_torch_export,
    open_torch_export,
    write_torch_export,
)
from flambeau.exports.formats.weights_file import (
    check_weights,
    open_weights,
    require_known_class,
    write_weights,
)

FORMATS = {
    one.name: one
    for one in (
        ModelFormat(
            "torch-export",
            "model.pt2",
            lambda _: None,
            write_torch_export,
            open_torch_export,
            check_torch_export,
        ),
        ModelFormat(
            "safetensors",
            "model.safetensors",
            require_known_class,
            write_weights,
            open_weights,
            check_weights,
        ),
        ModelFormat("onnx", "model.onnx", require_onnx, write_onnx, open_onnx),
        ModelFormat(
            "aoti",
            "model.aoti.pt2",
            require_compiler,
            write_aot_inductor,
            open_aot_inductor,
            is_code=True,
        ),
    )
}
