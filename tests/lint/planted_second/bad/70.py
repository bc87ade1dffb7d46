import torch

def detector(device="cuda"):
    model = torch.hub.load("someuser/yolo-fork", "custom", path="w.pt", trust_repo=True)
    model.to(device).eval()
    return model

with torch.no_grad():
    print(detector()(torch.zeros(1, 3, 640, 640, device="cuda")))
