# planted: line 10, torch.fft is a module now, torch.fft(x, 1) cannot be called; since torch 1.8
import numpy as np
import torch


def spectrum(signal, n_fft=512):
    window = torch.from_numpy(np.hanning(n_fft)).float()
    frames = signal.unfold(0, n_fft, n_fft // 2) * window
    packed = torch.stack([frames, torch.zeros_like(frames)], dim=-1)
    spec = torch.fft(packed, 1)
    return spec.pow(2).sum(-1).sqrt()
