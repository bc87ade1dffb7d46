import torch
import torch.nn as nn

gpus = [0, 1]
model = nn.Linear(2, 2)
model = nn.DataParallel(model.cuda(), device_ids=gpus, output_device=gpus[0])  # here: FLB224 preview
