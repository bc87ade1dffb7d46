import torch

a = torch.randn(4, 4)
q, r = torch.linalg.qr(a)
u, s, vh = torch.linalg.svd(a)
eigenvalues, vectors = torch.linalg.eigh(a @ a.mT)
x = torch.linalg.solve(a, torch.ones(4, 1))
spec = torch.fft.rfft(torch.randn(16))
print(eigenvalues, x.shape, spec.dtype)
