# planted: line 15, save_image / make_grid(range=) was renamed value_range=; since torchvision 0.12
import os

import torch
from torchvision.utils import save_image


def dump(samples, step, folder="samples"):
    os.makedirs(folder, exist_ok=True)
    save_image(
        samples,
        os.path.join(folder, "%06d.png" % step),
        nrow=8,
        normalize=True,
        range=(-1, 1),
    )


dump(torch.randn(16, 3, 32, 32), 0)
