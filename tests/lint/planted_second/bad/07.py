import torch.nn as nn
import torchvision.models as models

def build(num_classes, freeze=True):
    net = models.resnet50(pretrained=True)
    if freeze:
        for p in net.parameters():
            p.requires_grad = False
    net.fc = nn.Linear(net.fc.in_features, num_classes)
    return net

model = build(20)
