# planted: line 10, attribute of the wrapped model read from DataParallel; in all versions
import torch
import torch.nn as nn
from torchvision.models import resnet18

model = nn.DataParallel(resnet18().cuda())
for p in model.parameters():
    p.requires_grad = False

features = model.fc.in_features
print(features)
head = nn.Linear(features, 10).cuda()
opt = torch.optim.SGD(head.parameters(), lr=0.01)
