import argparse
import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="torchvision.models.resnet18")
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

model = eval(args.arch)(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
