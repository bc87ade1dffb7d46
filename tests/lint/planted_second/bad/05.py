import torch
import torch.nn as nn

class FFTLoss(nn.Module):
    def __init__(self, weight=0.1):
        super(FFTLoss, self).__init__()
        self.weight = weight
        self.l1 = nn.L1Loss()

    def forward(self, pred, target):
        pf = torch.rfft(pred, 2, normalized=False, onesided=False)
        with torch.no_grad():
            tf = torch.fft.fft2(target)
        return self.weight * self.l1(pf, torch.view_as_real(tf))
