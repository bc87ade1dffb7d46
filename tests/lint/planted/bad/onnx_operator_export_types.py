# planted: line 4, torch.onnx.OperatorExportTypes and operator_export_type are gone; since torch 2.9
import torch
import torch.onnx
from torch.onnx import OperatorExportTypes


def export(model, path, shape=(1, 3, 512, 512)):
    model.eval()
    torch.onnx.export(
        model,
        torch.randn(*shape),
        path,
        operator_export_type=OperatorExportTypes.ONNX,
    )
