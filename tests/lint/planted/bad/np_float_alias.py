# planted: line 12, np.float / np.int / np.bool were removed; since NumPy 1.24
import numpy as np
import torch
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, i):
        xy = np.array(self.rows[i], dtype=np.float)
        return torch.from_numpy(xy)

    def __len__(self):
        return len(self.rows)
