# planted: line 15, Variable(volatile=True) is ignored, the graph is kept; use torch.no_grad(); since torch 0.4
import torch
import torch.nn as nn
import torchvision.models as models
from torch.autograd import Variable

model = models.resnet18()
criterion = nn.CrossEntropyLoss()


def validate(val_loader):
    model.eval()
    losses = []
    for images, target in val_loader:
        images = Variable(images, volatile=True)
        output = model(images)
        losses.append(criterion(output, target).item())
    return sum(losses) / len(losses)
