# planted: line 16, add_(scalar, tensor) signature is deprecated; use alpha=; since torch 1.5
import torch
from torch.optim.optimizer import Optimizer


class PlainSGD(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.add_(-group["lr"], p.grad)
