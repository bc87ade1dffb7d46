import numpy as np

def pad(seqs, value=0):
    lens = [len(s) for s in seqs]
    out = np.full((len(seqs), max(lens)), value)
    for i, s in enumerate(seqs):
        out[i, : len(s)] = s
    return out

sentences = np.array([[1, 2, 3], [4, 5], [6]])
print(pad(sentences))
