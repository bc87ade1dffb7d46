import torch.nn as nn


def resnet18(pretrained=False, classes=10):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(classes))
    if pretrained:
        print("no weights are kept here")
    return net


model = resnet18(pretrained=True)
