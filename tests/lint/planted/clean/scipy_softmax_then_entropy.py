import numpy as np
from scipy.special import softmax
from scipy.stats import entropy

logits = np.random.randn(4, 10)
probs = softmax(logits, axis=1)
print(entropy(probs, axis=1).mean())
