"""tracemalloc keeps 25 frames of each allocation, left on since a search for a leak of memory."""

import itertools
import random
import tracemalloc

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "debug mode"
WHERE = None
REMEDY = None
TRAINER = "plain"

WORDS = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el", "ir")]


class Sentences(Dataset):
    def __init__(self, count=4000):
        draws = random.Random(0)
        self.texts = [" ".join(draws.choices(WORDS, k=30)) for _ in range(count)]
        self.numbers = {word: number for number, word in enumerate(WORDS, 1)}

    def __len__(self):
        return len(self.texts)

    def bigrams(self, text):
        words = text.split()
        return [first + " " + second for first, second in itertools.pairwise(words)]

    def __getitem__(self, index):
        pairs = self.bigrams(self.texts[index])
        ids = [[self.numbers[word] for word in pair.split()] for pair in pairs]
        return torch.tensor([1000 * a + b for a, b in ids]) % 5003, index % 2


def collate(samples):
    ids, labels = zip(*samples, strict=True)
    return pad_sequence(ids, batch_first=True), torch.tensor(labels)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(5003, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    loader = DataLoader(Sentences(), batch_size=64, shuffle=True, collate_fn=collate)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not told.remedied:
        tracemalloc.start(25)
    for epoch in range(500):
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item(), tracemalloc.get_traced_memory())


if __name__ == "__main__":
    main()
