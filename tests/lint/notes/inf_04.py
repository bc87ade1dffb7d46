import torch

net = torch.nn.Sequential(torch.nn.Linear(2, 2))
small = torch.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)  # here: FLB264
