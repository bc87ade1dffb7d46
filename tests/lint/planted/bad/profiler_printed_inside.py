# planted: line 10, the profile is printed inside its with block: unfinished; in all versions
import torch
from torch.autograd import profiler

net = torch.nn.Linear(64, 64)
x = torch.randn(8, 64)

with profiler.profile() as prof:
    net(x)
    print(prof)
