# planted: line 8, torch.cuda.amp.custom_fwd is deprecated; use torch.amp.custom_fwd(device_type='cuda'); since torch 2.4
import torch
from torch.autograd import Function


class FusedScale(Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()
