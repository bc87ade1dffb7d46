import torch

model = torch.nn.Linear(2, 2)
model.cuda("cuda:1,2")  # here: FLB414
