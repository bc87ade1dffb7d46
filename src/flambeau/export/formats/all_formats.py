"""The formats by name."""

from flambeau.export.formats.aot_inductor_file import open_aot_inductor, write_aot_inductor
from flambeau.export.formats.classifier import ModelFormat
from flambeau.export.formats.onnx_file import open_onnx, write_onnx
from flambeau.export.formats.torch_export_file import open_torch_export, write_torch_export
from flambeau.export.formats.weights_file import open_weights, write_weights

FORMATS = {
    one.name: one
    for one in (
        ModelFormat("torch-export", "model.pt2", write_torch_export, open_torch_export),
        ModelFormat("safetensors", "model.safetensors", write_weights, open_weights),
        ModelFormat("onnx", "model.onnx", write_onnx, open_onnx),
        ModelFormat("aoti", "model.aoti.pt2", write_aot_inductor, open_aot_inductor),
    )
}
