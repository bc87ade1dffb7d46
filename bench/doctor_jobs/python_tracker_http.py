"""The loss of each step is sent to a tracker by HTTP, whose answer is waited for."""

import http.server
import json
import threading
import time
import urllib.request
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "with urllib.request.urlopen(self.url, data=body) as answer:"
REMEDY = None
TRAINER = "plain"


class Service(http.server.BaseHTTPRequestHandler):
    """Stands for a tracker far away."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.025)  # the way there and back
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Tracker:
    def __init__(self, url: str, every: int) -> None:
        self.url = url
        self.every = every

    def log(self, step: int, **figures: float) -> None:
        if step % self.every:
            return
        body = json.dumps({"step": step, **figures}).encode()
        with urllib.request.urlopen(self.url, data=body) as answer:
            answer.read()


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tracker = Tracker(f"http://127.0.0.1:{server.server_port}", 100_000 if told.remedied else 1)
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 1
    for _ in range(1000):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracker.log(step, loss=loss.item())
            step += 1


if __name__ == "__main__":
    main()
