import torch
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def train(model, loader, optimizer):
    model.to(device)
    model.train()
    for images, labels in loader:
        images.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
