import numpy as np
import PIL.Image
import torch

array = torch.zeros(4, 4, 3).numpy()
image = PIL.Image.fromarray(array.astypde(np.uint8))  # here: left, attributes of NumPy's arrays are a type checker's
