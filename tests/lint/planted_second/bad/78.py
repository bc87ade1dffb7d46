import numpy as np
import torch

def collate(batch):
    images = [np.asarray(b["image"], dtype=np.float32) for b in batch]
    labels = [b["label"] for b in batch]
    return torch.tensor(images), torch.tensor(labels)

class Collate:
    def __call__(self, batch):
        return collate(batch)
