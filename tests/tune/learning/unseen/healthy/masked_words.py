"""A masked language model: most labels are -100, inputs are padded."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, MASK = 0, 1


class Sentences(Dataset):
    """Words come in fixed pairs, so a hidden word follows from its neighbor."""

    def __init__(self, n, seed=0):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            pairs = [rng.randrange(10) for _ in range(rng.randint(3, 6))]
            self.rows.append([t for p in pairs for t in (2 + p, 12 + (p * 3) % 10)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i])


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    labels = ids.clone()
    hidden = (torch.rand(ids.shape) < 0.2) & (ids != PAD)
    labels[~hidden] = -100
    return ids.masked_fill(hidden, MASK), labels, ids == PAD


class MaskedModel(nn.Module):
    def __init__(self, vocabulary=22, d=32, longest=12):
        super().__init__()
        self.words = nn.Embedding(vocabulary, d, padding_idx=PAD)
        self.places = nn.Embedding(longest, d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocabulary)

    def forward(self, ids, padding):
        h = self.words(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.encoder(h, src_key_padding_mask=padding))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Sentences(1200), batch_size=32, shuffle=True, collate_fn=collate)
    model = MaskedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    step = 0
    for _ in range(3):
        for ids, labels, padding in loader:
            logits = model(ids, padding)
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    main()
