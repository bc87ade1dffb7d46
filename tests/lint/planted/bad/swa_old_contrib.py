# planted: line 3, torchcontrib.optim.SWA is archived; use torch.optim.swa_utils; since torch 1.6
import torch
from torchcontrib.optim import SWA

model = torch.nn.Linear(4, 2)
base = torch.optim.SGD(model.parameters(), lr=0.1)
opt = SWA(base, swa_start=10, swa_freq=5, swa_lr=0.05)

for _ in range(100):
    opt.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
opt.swap_swa_sgd()
