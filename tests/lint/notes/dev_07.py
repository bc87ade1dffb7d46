import torch

torch.cuda.set_device("cuda:1,2")  # here: FLB414
