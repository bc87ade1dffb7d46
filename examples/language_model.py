"""A small language model: a transformer that predicts the next character, measured by its perplexity.

    python examples/language_model.py                             # on the documentation inside Python itself
    python examples/language_model.py --text novel.txt            # on a text of your own
    flambeau launch --procs 2 -- examples/language_model.py       # or torchrun --nproc-per-node 2

Kill it and start it again: it continues to the same bits.

It shows tied weights, weight decay on matrices alone, warmup and cosine, gradient accumulation and clipping,
and a perplexity, exp of the mean loss over all characters, that chooses the best checkpoint.
"""

import argparse
import os
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from flambeau import Run
from flambeau.recipes.models.param_groups import param_groups


class Blocks(Dataset):
    """A text (N,) of numbers, cut into blocks; a sample is (characters, the character after each)."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        block = self.text[start : start + self.length + 1]
        return block[:-1], block[1:]


class Perplexity:
    """exp of the mean loss over all characters, which is no mean over batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)  # of losses, ones

    def update(self, losses: Tensor) -> None:
        rows = torch.stack([losses.double(), torch.ones_like(losses).double()])
        self.sums = self.sums.to(rows.device) + rows.flatten(1).sum(1)

    def compute(self) -> Tensor:
        return (self.sums[0] / self.sums[1]).exp()

    # These two put the counts of several processes together.
    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def merge(self, state: dict[str, Tensor]) -> None:
        self.sums += state["sums"].to(self.sums.device)


class LanguageModel(nn.Module):
    """A GPT: each character sees itself and those before it."""

    def __init__(
        self, num_chars: int, context: int, *, width: int = 96, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(num_chars, width), nn.Embedding(context, width)
        layers = (
            nn.TransformerEncoderLayer(
                width,
                nhead=4,
                dim_feedforward=4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_chars, bias=False)
        for table in (self.chars, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.chars.weight  # tied: one matrix reads and writes characters

    def forward(self, text: Tensor) -> Tensor:  # (N, T) to (N, T, num_chars)
        x = self.chars(text) + self.places.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, length: int) -> Tensor:
    """Continue a text (T,), each character drawn from what the model thinks of it."""
    generator = torch.Generator(prompt.device).manual_seed(0)
    text = prompt
    context = model.places.num_embeddings
    for _ in range(length):
        chances = model(text[None, -context:])[0, -1].softmax(0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text of your own, UTF-8")
    parser.add_argument("--chars", type=int, default=300_000, help="so many of the text")
    parser.add_argument("--context", type=int, default=64, help="characters that it sees at once")
    parser.add_argument("--duration", default="6ep")
    parser.add_argument("--checkpoint-every", default="100st")
    parser.add_argument("--out", default="runs/language-model")
    told = parser.parse_args()

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)

    text = Path(told.text).read_text(encoding="utf-8") if told.text else "\n".join(topics.values())
    text = text[: told.chars]
    alphabet = sorted(set(text))
    number_of = {char: number for number, char in enumerate(alphabet)}
    numbers = torch.tensor([number_of[char] for char in text])
    train, test = numbers.split([len(text) - len(text) // 10, len(text) // 10])

    torch.manual_seed(0)  # of the initial weights
    model = LanguageModel(len(alphabet), told.context).to(device)
    optimizer = torch.optim.AdamW(
        param_groups(model, weight_decay=0.1), lr=5e-3, betas=(0.9, 0.95), fused=True
    )
    run = Run(
        told.out,
        model,
        optimizer,
        Blocks(train, told.context),
        duration=told.duration,
        checkpoint_every=told.checkpoint_every,
        batch_size=8,
        accumulate=2,
        schedule="cosine",
        warmup="5%",
        clip_norm=1.0,
        metrics={"val_perplexity": Perplexity()},
        best="val_perplexity",
        config={
            "context": told.context,
            "text": zlib.crc32(text.encode()),
        },  # no resume with another
    )
    for _ in run.epochs():
        for chars, following in run.batches():
            with run.autocast():
                loss = cross_entropy(model(chars).flatten(0, 1), following.flatten())
            run.step(loss)
        for chars, following in run.evaluate(Blocks(test, told.context)):
            losses = cross_entropy(model(chars).transpose(1, 2), following, reduction="none")
            run.log(val_perplexity=losses, val_loss=losses)

    if os.environ.get("RANK", "0") == "0":
        shares = torch.bincount(train, minlength=len(alphabet)).add(1).double()
        unigram = (shares / shares.sum()).log()[test].mean().neg().exp()
        perplexity = run.result.metrics["val_perplexity"]
        print(f"perplexity per character: {perplexity:.3f}; by frequency alone {unigram:.3f}")
        written = write(model.eval(), test[: told.context].to(device), 300)
        print("".join(alphabet[number] for number in written))


if __name__ == "__main__":
    main()
