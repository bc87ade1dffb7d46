# planted: line 10, torch.rfft was removed; use torch.fft; since torch 1.8
import torch
import torch.nn as nn


class FFTLoss(nn.Module):
    """L1 distance of the spectra, as in the deblurring papers."""

    def forward(self, pred, target):
        pred_fft = torch.rfft(pred, signal_ndim=2, normalized=False, onesided=False)
        target_fft = torch.rfft(target, signal_ndim=2, normalized=False, onesided=False)
        return (pred_fft - target_fft).abs().mean()
