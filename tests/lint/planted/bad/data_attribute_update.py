# planted: line 10, .data is not tracked by autograd; use detach() or no_grad(); since torch 0.4
import torch

w = torch.randn(10, requires_grad=True)
lr = 0.1

for _ in range(50):
    loss = (w**2).sum()
    loss.backward()
    w.data -= lr * w.grad
    w.grad.zero_()
print(loss.item())
