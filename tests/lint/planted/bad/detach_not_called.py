# planted: line 6, tensor.detach.clone(): detach is not called; in all versions
import torch


def ema_update(avg, new, beta=0.99):
    return beta * avg + (1 - beta) * new.detach.clone()


avg = torch.zeros(3)
for _ in range(10):
    avg = ema_update(avg, torch.randn(3, requires_grad=True))
print(avg)
