import torch

def whiten(feat, eps=1e-5):
    feat = feat - feat.mean(0, keepdim=True)
    e, v = torch.linalg.eigh(feat.T @ feat / (feat.shape[0] - 1))
    u, s, vh = torch.linalg.svd(feat, full_matrices=False)
    w = torch.linalg.solve(feat.T @ feat + eps * torch.eye(feat.shape[1]), feat.T)
    return v @ torch.diag((e + eps).rsqrt()) @ v.T, u * s @ vh, w
