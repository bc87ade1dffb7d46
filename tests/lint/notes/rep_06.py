import torch

torch.set_deterministic(True)  # here: FLB114
