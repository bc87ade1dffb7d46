import numpy as np
import PIL.Image
import torch

image = PIL.Image.open("photo.jpg")
tensor = torch.from_numpy(np.asarray(image)).permute(2, 0, 1).float() / 255  # here: left, whether an image is gray or has a palette is in the image
