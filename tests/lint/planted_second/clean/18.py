import numpy as np
import torch
from torch.utils.data import Dataset

class Arrays(Dataset):
    def __init__(self, path):
        data = np.load(path, allow_pickle=False)
        self.x = data["x"].astype(np.float32)
        self.y = data["y"].astype(np.int64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), int(self.y[i])
