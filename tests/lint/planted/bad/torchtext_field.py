# planted: line 3, torchtext.data.Field was removed (torchtext is no longer developed); since torchtext 0.12
import torch
from torchtext.data import BucketIterator, Field, TabularDataset

TEXT = Field(sequential=True, lower=True, batch_first=True)
LABEL = Field(sequential=False, use_vocab=False)
train, valid = TabularDataset.splits(
    path="data",
    train="train.csv",
    validation="valid.csv",
    format="csv",
    fields=[("text", TEXT), ("label", LABEL)],
)
TEXT.build_vocab(train)
it = BucketIterator(train, batch_size=32, device=torch.device("cpu"))
