import torch

class Stft(torch.nn.Module):
    def __init__(self, n_fft=512, hop=128):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wav):
        spec = torch.stft(wav, self.n_fft, hop_length=self.hop, window=self.window)
        real, imag = spec[..., 0], spec[..., 1]
        return torch.sqrt(real ** 2 + imag ** 2 + 1e-9)
