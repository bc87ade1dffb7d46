"""A character language model on made-up words."""

import random

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {"d_model": 48, "heads": 4, "layers": 2, "context": 24, "batch": 16, "steps": 80, "lr": 2e-3}


def make_corpus(seed):
    rng = random.Random(seed)
    words = ["torch", "lamp", "ember", "flame", "wick", "spark"]
    return " ".join(rng.choice(words) for _ in range(3000))


class Decoder(nn.Module):
    def __init__(self, vocabulary, config):
        super().__init__()
        d = config["d_model"]
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(config["context"], d)
        layer = nn.TransformerEncoderLayer(d, config["heads"], 4 * d, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, config["layers"], enable_nested_tensor=False)
        self.head = nn.Linear(d, vocabulary)

    def features(self, ids):
        place = torch.arange(ids.shape[1], device=ids.device)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.blocks(self.tokens(ids) + self.positions(place), mask=mask, is_causal=True)

    def forward(self, ids):
        return next_token_distribution(self.head(self.features(ids)))


def next_token_distribution(scores):
    return F.softmax(scores, dim=-1)


def sample_batch(data, config, generator):
    starts = torch.randint(len(data) - config["context"] - 1, (config["batch"],), generator=generator)
    windows = torch.stack([data[s : s + config["context"] + 1] for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def language_model_loss(model, inputs, targets):
    out = model(inputs)
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def main():
    torch.manual_seed(1)
    text = make_corpus(3)
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text])
    model = Decoder(len(letters), CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"])
    generator = torch.Generator().manual_seed(0)
    for step in range(CONFIG["steps"]):
        inputs, targets = sample_batch(data, CONFIG, generator)
        loss = language_model_loss(model, inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
