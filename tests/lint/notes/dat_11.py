from torch.utils.data import Sampler


class InOrder(Sampler):
    def __init__(self, data_source):
        super().__init__(data_source)  # here: FLB1103
        self.data_source = data_source

    def __iter__(self):
        return iter(range(len(self.data_source)))
