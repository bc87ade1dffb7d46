import torch.nn.functional as F

def validate(model, loader, device):
    model.eval()
    loss_sum, n = 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        loss_sum += F.cross_entropy(out, y, reduction="sum").item()
        n += y.size(0)
    return loss_sum / n
