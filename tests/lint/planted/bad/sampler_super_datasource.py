# planted: line 8, Sampler.__init__(data_source) was removed; since torch 2.x
import torch
from torch.utils.data.sampler import Sampler


class PairSampler(Sampler):
    def __init__(self, data_source, num_pairs):
        super().__init__(data_source)
        self.num_pairs = num_pairs

    def __iter__(self):
        return iter(torch.randint(0, 100, (self.num_pairs,)).tolist())

    def __len__(self):
        return self.num_pairs
