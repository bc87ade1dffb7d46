import numpy as np
from PIL import Image


def small(path):
    img = Image.open(path).convert("RGB")
    img = img.resize((64, 64), resample=Image.Resampling.BILINEAR)
    return np.asarray(img).copy()
