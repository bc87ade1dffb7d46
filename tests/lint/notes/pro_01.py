import torch

net = torch.nn.Linear(2, 2)
with torch.autograd.profiler.profile(enabled=True, use_cuda=False) as prof:  # here: FLB191
    net(torch.ones(1, 2))
    print(prof)  # here: FLB447
