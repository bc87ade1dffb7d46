import torch
from torch.autograd import Variable

def predict(model, loader):
    model.eval()
    out = []
    for images, _ in loader:
        images = Variable(images.cuda(), volatile=True)
        out.append(model(images).cpu())
    return torch.cat(out)
