import torch.nn.functional as F
import torch

@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    total = torch.zeros((), device=device)
    n = 0
    for x, y in loader:
        out = model(x.to(device))
        total += F.cross_entropy(out, y.to(device), reduction="sum")
        n += y.size(0)
    return (total / n).item()
