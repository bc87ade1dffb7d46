import torch as th

def whiten(feat, eps=1e-5):
    feat = feat - feat.mean(0, keepdim=True)
    cov = feat.t() @ feat / (feat.size(0) - 1)
    e, v = th.symeig(cov, eigenvectors=True)
    scale = th.diag(1.0 / th.sqrt(e + eps))
    return feat @ v @ scale @ v.t()

x = th.randn(256, 16)
print(whiten(x).shape)
