import numpy as np
import torch
from torch.utils.data import TensorDataset

def load_split(path):
    d = np.load(path, allow_pickle=True).item()
    return TensorDataset(torch.from_numpy(d["x"]), torch.from_numpy(d["y"]))
