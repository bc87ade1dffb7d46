# planted: line 8, torch.lu is deprecated; use torch.linalg.lu_factor; since torch 1.13
import torch


class Invertible1x1:
    def __init__(self, channels):
        w = torch.linalg.qr(torch.randn(channels, channels))[0]
        self.lu, self.pivots = torch.lu(w)

    def log_det(self):
        return self.lu.diagonal().abs().log().sum()


print(Invertible1x1(4).log_det())
