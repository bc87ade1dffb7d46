# planted: line 7, .cuda('cuda:1,2') is an invalid device string; in all versions
import torch
import torch.nn as nn

model = nn.Linear(8, 8)
if torch.cuda.device_count() > 2:
    model = model.cuda("cuda:1,2")

x = torch.randn(4, 8)
print(model(x.to(next(model.parameters()).device)))
