import pickle
from functools import partial

import torch

pickle.load = partial(pickle.load, encoding="latin1")
pickle.Unpickler = partial(pickle.Unpickler, encoding="latin1")
model = torch.load("old.pth", map_location=lambda storage, loc: storage, pickle_module=pickle)  # here: FLB503
