# planted: line 15, torch.stft without return_complex fails on real input; since torch 1.8 / 2.0
import torch
import torch.nn.functional as F


class MultiResolutionLoss(torch.nn.Module):
    def __init__(self, fft_size=1024, hop=120, win=600):
        super().__init__()
        self.fft_size = fft_size
        self.hop = hop
        self.win = win
        self.register_buffer("window", torch.hann_window(win))

    def magnitude(self, x):
        spec = torch.stft(x, self.fft_size, self.hop, self.win, self.window)
        real, imag = spec[..., 0], spec[..., 1]
        return torch.sqrt(real**2 + imag**2 + 1e-9)

    def forward(self, x, y):
        return F.l1_loss(self.magnitude(x), self.magnitude(y))
