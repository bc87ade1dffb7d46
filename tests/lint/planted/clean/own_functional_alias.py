import numpy as np

import myproject.functional as F


def activate(x):
    y = F.sigmoid(x)
    z = F.softmax(y)
    return F.tanh(z) + F.upsample(np.asarray(y), 2)
