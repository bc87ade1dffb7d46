# planted: line 14, torch.cholesky is deprecated; use torch.linalg.cholesky; since torch 1.8
import math

import torch


class GaussianProcess:
    def __init__(self, kernel, noise=1e-3):
        self.kernel = kernel
        self.noise = noise

    def log_marginal(self, x, y):
        k = self.kernel(x, x) + self.noise * torch.eye(len(x))
        chol = torch.cholesky(k)
        alpha = torch.cholesky_solve(y, chol)
        n = len(x)
        return -0.5 * (y * alpha).sum() - chol.diagonal().log().sum() - n / 2 * math.log(2 * math.pi)
