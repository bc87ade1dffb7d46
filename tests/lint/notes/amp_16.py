import torch

torch.backends.cuda.matmul.allow_tf32 = True  # here: FLB246
torch.backends.cudnn.allow_tf32 = True  # here: FLB247
