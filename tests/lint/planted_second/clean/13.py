import torch

class MaskedMean(torch.nn.Module):
    def forward(self, x, ids, pad=0):
        mask = ids != pad
        keep = (~mask).logical_not().unsqueeze(-1)
        return (x * keep).sum(1) / keep.sum(1).clamp(min=1)

print(MaskedMean()(torch.randn(2, 3, 4), torch.tensor([[1, 2, 0], [3, 0, 0]])).shape)
