import numpy as np
import torch

i = torch.IntTensor(1)  # here: FLB2112
x = torch.Tensor(np.array(2.0))  # here: FLB2113
b = torch.BoolTensor(np.array([True, False]))  # here: FLB2112
