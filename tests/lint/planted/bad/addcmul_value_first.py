# planted: line 17, addcmul_(value, t1, t2) signature is deprecated; use value=; since torch 1.5
import math

import torch
from torch.optim import Optimizer


class AdamLike(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super(AdamLike, self).__init__(params, dict(lr=lr, betas=betas, eps=eps))

    def update(self, p, grad, state, group):
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        state["step"] += 1
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(1 - beta2, grad, grad)
        denom = exp_avg_sq.sqrt().add_(group["eps"])
        step_size = group["lr"] * math.sqrt(1 - beta2 ** state["step"])
        p.addcdiv_(exp_avg, denom, value=-step_size)
