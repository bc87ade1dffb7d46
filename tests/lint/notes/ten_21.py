import torch

tensor = torch.ones(2, requires_grad=True)
copy = tensor.detach.clone()  # here: FLB441
