# planted: line 8, torch.solve was removed; use torch.linalg.solve (arguments swapped); since torch 1.13
import torch


def ridge(X, y, lam=1e-2):
    d = X.shape[1]
    gram = X.t() @ X + lam * torch.eye(d, dtype=X.dtype)
    w, _ = torch.solve(X.t() @ y, gram)
    return w


w = ridge(torch.randn(200, 12), torch.randn(200, 1))
print(w.norm())
