# planted: line 6, torch.save of a whole model: torch.load refuses it by default; since torch 2.6
import torch
from torchvision.models import resnet18

net = resnet18()
torch.save(net, "whole.pth")


def predict(x):
    net.eval()
    with torch.no_grad():
        return net(x).argmax(1)


print(predict(torch.randn(1, 3, 224, 224)))
