"""每一步都把学生网络整个复制成教师网络。The teacher is a whole copy of the student, made in each step."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "教师 = copy.deepcopy(学生).eval()"
REMEDY = None
TRAINER = "plain"

词数, 类别数 = 150_000, 12


class TextClassifier(nn.Module):
    """词袋模型，词向量的梯度是稀疏的。"""

    def __init__(self, 宽度: int = 64) -> None:
        super().__init__()
        self.词向量 = nn.EmbeddingBag(词数, 宽度, sparse=True)
        self.输出层 = nn.Linear(宽度, 类别数)

    def forward(self, 词: torch.Tensor) -> torch.Tensor:
        return self.输出层(self.词向量(词))


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    数据 = TensorDataset(torch.randint(0, 词数, (16_000, 40)), torch.randint(0, 类别数, (16_000,)))
    加载器 = DataLoader(数据, batch_size=32, shuffle=True, drop_last=True)
    学生 = TextClassifier()
    优化器 = torch.optim.SGD(学生.parameters(), lr=0.01)
    间隔 = 500 if told.remedied else 1
    步数 = 0
    for 轮次 in range(200):
        for 输入, 标签 in 加载器:
            if 步数 % 间隔 == 0:  # 更新教师
                教师 = copy.deepcopy(学生).eval()
            with torch.no_grad():
                目标 = 教师(输入).softmax(-1)
            输出 = 学生(输入)
            损失 = F.cross_entropy(输出, 标签) + F.cross_entropy(输出, 目标)
            优化器.zero_grad()
            损失.backward()
            优化器.step()
            步数 += 1
        print(f"第 {轮次} 轮：损失 {损失.item():.3f}")


if __name__ == "__main__":
    main()
