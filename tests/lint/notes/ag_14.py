import torch

x = torch.ones(2, requires_grad=True)
y = x * 2
torch.autograd.backward([y], grad_variables=[torch.ones(2)])  # here: FLB2164
