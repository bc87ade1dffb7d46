import torch
import torch.nn as nn
from torchvision.models import resnet50

model = resnet50()
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
