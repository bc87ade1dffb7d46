# planted: line 10, autograd.profiler.profile(use_cuda=) was removed; use use_device='cuda'; since torch 2.14
import torch
from torchvision.models import resnet50

model = resnet50().cuda().eval()
inputs = torch.randn(8, 3, 224, 224, device="cuda")

with torch.no_grad():
    model(inputs)
    with torch.autograd.profiler.profile(use_cuda=True) as prof:
        model(inputs)

print(prof.key_averages().table(row_limit=10))
