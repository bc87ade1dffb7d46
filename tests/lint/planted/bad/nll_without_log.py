# planted: line 19, NLLLoss on softmax output (needs log_softmax); in all versions
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tagger(nn.Module):
    def __init__(self, vocab, tags):
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.out = nn.Linear(32, tags)

    def forward(self, words):
        return F.softmax(self.out(self.emb(words)), dim=-1)


def loss_of(model, words, tags):
    scores = model(words)
    return F.nll_loss(F.softmax(scores, dim=-1), tags)
