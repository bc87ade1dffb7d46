import torch
from torch import nn


class Retriever(nn.Module):
    """Questions and answers in one space; the right answer is the nearest."""

    def __init__(self, vocabulary, d):
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, d, mode="mean")
        self.encoder = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.project_question = nn.Linear(d, d)
        self.project_answer = nn.Linear(d, d)
        self.scale = nn.Parameter(torch.tensor(2.0))

    @torch.no_grad()
    def encode(self, ids):
        return self.encoder(self.words(ids))

    def forward(self, questions, answers):
        q = nn.functional.normalize(self.project_question(self.encode(questions)), dim=1)
        a = nn.functional.normalize(self.project_answer(self.encode(answers)), dim=1)
        return self.scale.exp() * q @ a.T


def pairs(n, vocabulary):
    topic = torch.randint(20, (n, 1))
    questions = topic * 5 + torch.randint(5, (n, 6))
    answers = (topic * 5 + torch.randint(5, (n, 6))) % 100 + 100
    return questions % vocabulary, answers % vocabulary


def main():
    torch.manual_seed(0)
    model = Retriever(200, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
        questions, answers = pairs(24, 200)
        scores = model(questions, answers)
        target = torch.arange(24)
        loss = nn.functional.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
