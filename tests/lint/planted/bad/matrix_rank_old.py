# planted: line 7, torch.matrix_rank was removed; use torch.linalg.matrix_rank; since torch 1.13
import torch
from sklearn.datasets import make_blobs

features, _ = make_blobs(n_samples=200, n_features=16)
features = torch.from_numpy(features)
rank = torch.matrix_rank(features)
assert int(rank) <= 16
print("rank of the representation:", int(rank))
