# planted: line 5, reduction='elementwise_mean' was renamed to 'mean' and is refused; since torch 1.0
import torch
from torch import nn

mse = nn.MSELoss(reduction="elementwise_mean")


def psnr(output, target, max_val=1.0):
    return 10 * torch.log10(max_val**2 / mse(output, target))


if __name__ == "__main__":
    a = torch.rand(1, 3, 16, 16)
    b = torch.rand(1, 3, 16, 16)
    print(psnr(a, b).item())
