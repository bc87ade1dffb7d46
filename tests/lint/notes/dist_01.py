import torch
import torch.nn as nn

model = nn.Linear(2, 2)
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)  # here: FLB224 preview
