# planted: line 13, torch.onnx.export(example_outputs=) was removed; since torch 1.10
import torch
import torchvision

model = torchvision.models.mobilenet_v2()
model.eval()
dummy = torch.randn(1, 3, 224, 224)
out = model(dummy)
torch.onnx.export(
    model,
    dummy,
    "mobilenet.onnx",
    example_outputs=out,
    input_names=["image"],
    output_names=["scores"],
)
