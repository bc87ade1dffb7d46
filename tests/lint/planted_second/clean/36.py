import torch
from torchvision.utils import make_grid, save_image

@torch.no_grad()
def sample(gen, z, path):
    was_training = gen.training
    gen.eval()
    img = gen(z)
    save_image(img, path, nrow=8, normalize=True, value_range=(-1, 1))
    grid = make_grid(img, nrow=4)
    gen.train(was_training)
    return grid
