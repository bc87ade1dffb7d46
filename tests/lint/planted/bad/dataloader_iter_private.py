# planted: line 4, _DataLoaderIter was removed; since torch 1.2
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DataLoaderIter


class EndlessLoader(DataLoader):
    def __iter__(self):
        while True:
            yield from _DataLoaderIter(self)


loader = EndlessLoader(torch.arange(10), batch_size=2)
