import numpy as np
import torch
from torch.utils.data import Dataset

class Boxes(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        box = np.array(self.rows[i], dtype=np.float)
        return torch.from_numpy(box).float()
