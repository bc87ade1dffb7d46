# planted: line 10, backward(grad_variables=) was renamed to gradient/grad_tensors; since torch 0.4
import torch

x = torch.randn(3, requires_grad=True)
y = x * 2
while y.norm() < 1000:
    y = y * 2

weights = torch.tensor([0.1, 1.0, 0.0001])
torch.autograd.backward([y], grad_variables=[weights])
print(x.grad)
