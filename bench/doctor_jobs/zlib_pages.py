"""Each sample decompresses the whole page that it lies on."""

import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("decode", "transform")
WHERE = "page = zlib.decompress(self.pages[index // self.per_page])"
REMEDY = None
TRAINER = "plain"


class Pages(Dataset):
    """数据按页压缩存放。"""

    per_page = 500

    def __init__(self, compress: bool) -> None:
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 4, (8, self.per_page * 64)).astype(np.float32)
        self.compress = compress
        self.pages = [zlib.compress(row.tobytes()) if compress else row.tobytes() for row in rows]

    def __len__(self) -> int:
        return len(self.pages) * self.per_page

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.compress:
            page = zlib.decompress(self.pages[index // self.per_page])
        else:
            page = self.pages[index // self.per_page]
        at = index % self.per_page * 64
        return torch.frombuffer(bytearray(page[at * 4 : at * 4 + 256]), dtype=torch.float32)


def main() -> None:
    told = job.begin(REMEDY)
    loader = DataLoader(
        Pages(compress=not told.remedied), 64, shuffle=True, num_workers=1, persistent_workers=True
    )
    # 自编码器
    encoder, decoder = nn.Linear(64, 16), nn.Linear(16, 64)
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3)
    for epoch in range(1000):
        for x in loader:
            loss = nn.functional.mse_loss(decoder(torch.relu(encoder(x))), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("第", epoch, "轮", loss.item())


if __name__ == "__main__":
    main()
