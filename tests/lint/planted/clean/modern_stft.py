import torch
from torch import nn


class Spectrogram(nn.Module):
    def __init__(self, n_fft=512):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        spec = torch.stft(wave, self.n_fft, window=self.window, return_complex=True)
        return spec.abs().square()
