import torch
from torch import nn

CONFIGS = {
    "sgd": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
}
OPTIMIZER = "adam"
PRESET = "sgd"


class TextClassifier(nn.Module):
    def __init__(self, vocabulary=60, d=24, classes=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, classes))

    def forward(self, ids):
        h = self.embedding(ids)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.mlp(h.mean(1))


def sentences(n):
    label = torch.randint(3, (n,))
    ids = torch.randint(60, (n, 12))
    cue = torch.rand(n, 12) < 0.3
    ids[cue] = (label[:, None].expand(-1, 12) * 20 + torch.randint(20, (n, 12)))[cue]
    return ids, label


def optimizer_for(model, kind, preset):
    options = dict(CONFIGS[preset])
    if kind == "adam":
        options.pop("momentum", None)
        return torch.optim.Adam(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), **options)


torch.manual_seed(0)
model = TextClassifier()
optimizer = optimizer_for(model, OPTIMIZER, PRESET)
for step in range(80):
    ids, label = sentences(32)
    loss = nn.functional.cross_entropy(model(ids), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
