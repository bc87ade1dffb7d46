import os

os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # here: FLB604

import torch

print(torch.cuda.is_available())
