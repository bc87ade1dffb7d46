# planted: line 8, torch.symeig was removed; use torch.linalg.eigh; since torch 2.0
import torch


def whiten(x, eps=1e-5):
    x = x - x.mean(dim=0, keepdim=True)
    cov = x.t() @ x / (x.size(0) - 1)
    e, v = torch.symeig(cov, eigenvectors=True)
    scale = torch.diag(1.0 / torch.sqrt(e + eps))
    return x @ (v @ scale @ v.t())


print(whiten(torch.randn(100, 8)).shape)
