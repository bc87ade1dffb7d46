# planted: line 6, pretrained=True is deprecated; use weights=; since torchvision 0.13
import torch
import torch.nn as nn
from torchvision import models

model_ft = models.resnet18(pretrained=True)
num_ftrs = model_ft.fc.in_features
model_ft.fc = nn.Linear(num_ftrs, 2)
model_ft.eval()
with torch.no_grad():
    print(model_ft(torch.randn(1, 3, 224, 224)))
