# planted: line 15, torch.set_deterministic was removed; use use_deterministic_algorithms; since torch 1.8 / 1.10
import os
import random

import numpy as np
import torch


def seed_everything(seed=42):
    random.seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.set_deterministic(True)


seed_everything()
