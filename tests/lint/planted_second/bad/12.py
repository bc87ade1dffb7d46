import torch
from torchvision import utils

@torch.no_grad()
def sample(g_ema, z, step):
    g_ema.eval()
    img = g_ema(z)
    utils.save_image(
        img,
        f"sample/{step:06d}.png",
        nrow=8,
        normalize=True,
        range=(-1, 1),
    )
