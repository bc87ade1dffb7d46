import numpy as np
import torch

def iou(a, b):
    inter = np.logical_and(a, b).sum(dtype=np.float64)
    union = np.logical_or(a, b).sum(dtype=np.float64)
    return float(inter / union) if union else np.nan

def collate(batch):
    images = torch.from_numpy(np.stack([b[0] for b in batch]))
    lens = np.array([len(b[1]) for b in batch], dtype=int)
    ragged = np.array([b[1] for b in batch] + [None], dtype=object)[:-1]
    return images, lens, ragged, np.prod(images.shape)
