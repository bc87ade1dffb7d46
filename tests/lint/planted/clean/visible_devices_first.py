import os

os.environ["CUDA_VISIBLE_DEVICES"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
print(torch.cuda.device_count())
