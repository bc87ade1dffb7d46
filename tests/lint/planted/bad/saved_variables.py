# planted: line 13, ctx.saved_variables is deprecated, then removed; use ctx.saved_tensors; since torch 0.4
import torch


class MySquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_variables
        return 2 * x * grad_output


y = MySquare.apply(torch.ones(3, requires_grad=True))
