# planted: line 8, no model.eval() in the validation function; in all versions
import torch


def validate(model, val_loader, device):
    correct = 0
    total = 0
    with torch.no_grad():
        for images, labels in val_loader:
            outputs = model(images.to(device))
            _, predicted = torch.max(outputs, 1)
            total += labels.size(0)
            correct += (predicted.cpu() == labels).sum().item()
    return correct / total
