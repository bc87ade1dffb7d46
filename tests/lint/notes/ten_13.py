import torch

tensor = torch.zeros(2)
array = tensor.data.numpy()  # here: FLB2161
array += 1
