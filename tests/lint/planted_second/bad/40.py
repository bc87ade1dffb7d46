import torch.nn as nn
import torch.utils.checkpoint as checkpoint

class Stage(nn.Module):
    def __init__(self, blocks, use_checkpoint=False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.use_checkpoint = use_checkpoint

    def forward(self, x):
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint.checkpoint(blk, x)
            else:
                x = blk(x)
        return x
