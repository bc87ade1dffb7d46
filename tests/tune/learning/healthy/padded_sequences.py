"""Label the words of sentences of different lengths; padding counts nowhere."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

PAD_TOKEN = 0
PAD_LABEL = -100  # what cross_entropy ignores by default


class Tagger(nn.Module):
    def __init__(self, vocabulary, num_tags):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24, padding_idx=PAD_TOKEN)
        self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, num_tags)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(hidden)


def collate(samples):
    tokens = pad_sequence([t for t, _ in samples], batch_first=True, padding_value=PAD_TOKEN)
    labels = pad_sequence([y for _, y in samples], batch_first=True, padding_value=PAD_LABEL)
    return tokens, labels, torch.tensor([len(t) for t, _ in samples])


def sentence(kind):
    tokens = torch.randint(1, 40, (int(torch.randint(3, 25, (1,))),))
    return tokens, kind[tokens]


torch.manual_seed(0)
kind = torch.randint(5, (40,))
loader = DataLoader([sentence(kind) for _ in range(1600)], 16, shuffle=True, collate_fn=collate)
model = Tagger(40, 5)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
for step, (tokens, labels, lengths) in enumerate(loader):
    logits = model(tokens, lengths)
    loss = criterion(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
