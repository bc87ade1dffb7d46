import random
import numpy as np
import torch
from torch.utils.data import DataLoader

def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)

def loader(dataset, seed):
    gen = torch.Generator()
    gen.manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size=32,
        shuffle=True,
        num_workers=4,
        worker_init_fn=seed_worker,
        generator=gen,
        persistent_workers=True,
    )
