# planted: line 9, torch.svd is deprecated; use torch.linalg.svd (V becomes Vh); since torch 1.8
import torch


def kabsch(p, q):
    pc = p - p.mean(0)
    qc = q - q.mean(0)
    h = pc.t().mm(qc)
    u, s, v = torch.svd(h)
    d = torch.sign(torch.det(v @ u.t()))
    diag = torch.eye(3)
    diag[2, 2] = d
    return v @ diag @ u.t()
