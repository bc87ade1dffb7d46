# planted: line 10, torch.jit.trace is deprecated; use torch.export; since torch 2.11
import torch
import torchvision.models as models


def main():
    net = models.resnet18()
    net.eval()
    example = torch.rand(1, 3, 224, 224)
    traced = torch.jit.trace(net, example)
    traced.save("resnet18_traced.pt")


main()
