import torch

URL = "https://example.org/models/best.pt"

def get_model(net):
    torch.hub.download_url_to_file(URL, "best.pt")
    ckpt = torch.load("best.pt", map_location="cpu", weights_only=False)
    net.load_state_dict(ckpt["model"])
    return net.eval()
