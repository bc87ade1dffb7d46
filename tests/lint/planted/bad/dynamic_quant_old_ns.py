# planted: line 10, torch.quantization.quantize_dynamic is deprecated (torch.ao.quantization, torchao); since torch 1.10 / 2.8
import torch
import torch.nn as nn


def compress(model_path, out_path):
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    model.load_state_dict(torch.load(model_path, map_location="cpu"))
    model.eval()
    small = torch.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    torch.save(small.state_dict(), out_path)


compress("mnist.pt", "mnist_int8.pt")
