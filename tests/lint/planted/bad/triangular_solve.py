# planted: line 7, torch.triangular_solve is deprecated; use torch.linalg.solve_triangular; since torch 1.11
import torch


def mahalanobis(x, mean, chol):
    diff = (x - mean).t()
    z, _ = torch.triangular_solve(diff, chol, upper=False)
    return (z**2).sum(0)


cov = torch.eye(3) * 2
print(mahalanobis(torch.randn(4, 3), torch.zeros(3), torch.linalg.cholesky(cov)))
