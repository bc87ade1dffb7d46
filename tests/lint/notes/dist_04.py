import torch.nn as nn
from torchvision.models import resnet18

model_parallel = nn.DataParallel(resnet18())  # here: FLB224 preview
print(model_parallel.module.fc)
