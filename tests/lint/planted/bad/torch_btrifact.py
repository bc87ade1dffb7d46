# planted: line 6, torch.btrifact was removed; use torch.linalg.lu_factor; since torch 1.2
import torch

A = torch.randn(5, 3, 3)
b = torch.randn(5, 3, 1)
A_LU, pivots = torch.btrifact(A)
x = torch.lu_solve(b, A_LU, pivots)
residual = (A @ x - b).abs().max()
print("residual", residual.item())
