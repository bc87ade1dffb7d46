# planted: line 11, torch.sparse.FloatTensor is deprecated; use sparse_coo_tensor; since torch 2.0
import numpy as np
import scipy.sparse as sp
import torch


def to_torch_sparse(matrix):
    coo = sp.coo_matrix(matrix).astype(np.float32)
    indices = torch.from_numpy(np.vstack((coo.row, coo.col)).astype(np.int64))
    values = torch.from_numpy(coo.data)
    return torch.sparse.FloatTensor(indices, values, torch.Size(coo.shape))
