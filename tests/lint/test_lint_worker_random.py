"""`np.random` in the workers of a DataLoader: where it is found, and for which versions of torch."""

import json
import os
import subprocess
import textwrap

import pytest

from flambeau_lint.engine import RuleSet, lint
from flambeau_lint.rules.catalog import BY_CODE

RULE = BY_CODE["FLB462"]
OF_WORKERS = {
    "a method": """
        class Data(Dataset):
            def __getitem__(self, index):
                return self.crop(index)
            def crop(self, index):
                return np.random.rand()
        """,
    "a function": """
        def crop():
            return np.random.rand()
        class Data(Dataset):
            def __getitem__(self, index):
                return crop()
        """,
    "a class in between": """
        class Base(Dataset):
            pass
        class Data(Base):
            def __getitem__(self, index):
                return [np.random.rand() for _ in range(2)]
        loader = DataLoader(Data(), num_workers=4)
        """,
    "of torchvision": """
        from torchvision.datasets import ImageFolder
        class Data(ImageFolder):
            def __getitem__(self, index):
                return np.random.rand()
        """,
    "a collate_fn": """
        def collate(batch):
            return np.random.rand()
        loader = DataLoader(data, collate_fn=collate, num_workers=count)
        """,
}
OF_OTHERS = {
    "seeded": """
        class Data(Dataset):
            def __getitem__(self, index):
                return np.random.rand()
        loader = DataLoader(Data(), num_workers=4, worker_init_fn=seed)
        """,
    "no workers": """
        class Data(Dataset):
            def __getitem__(self, index):
                return np.random.rand()
        loader = DataLoader(Data(), 8)
        other = DataLoader(Data(), num_workers=0)
        """,
    "made once": """
        class Data(Dataset):
            def __init__(self):
                self.noise = np.random.rand()
            def __getitem__(self, index):
                return self.noise
        """,
    "no dataset": """
        class Data:
            def __getitem__(self, index):
                return np.random.rand()
        """,
    "a generator": """
        class Data(Dataset):
            def __getitem__(self, index):
                return np.random.default_rng(index).random()
        """,
    "derives from itself": """
        class Data(Other):
            def __getitem__(self, index):
                return np.random.rand()
        class Other(Data):
            pass
        """,
    "calls itself": """
        def crop(depth):
            return np.random.rand() if depth else crop(depth + 1)
        """,
}


def found(text: str) -> list[str]:
    head = "import numpy as np\nfrom torch.utils.data import DataLoader, Dataset\n"
    return [one.code for one in lint((head + textwrap.dedent(text)).encode(), RuleSet([RULE]))]


@pytest.mark.parametrize("name", OF_WORKERS)
def test_found(name: str) -> None:
    assert found(OF_WORKERS[name]) == ["FLB462"]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_left_alone(name: str) -> None:
    assert found(OF_OTHERS[name]) == []


def test_one_rule_before_1_9_and_another_on_the_way_from_there() -> None:
    assert RULE.holds("1.8.1")
    assert not RULE.holds("1.9")
    assert not RULE.holds("2.15", since="1.8")
    way = BY_CODE["FLB325"]
    assert way.holds("2.15", since="1.8")
    assert not way.holds("2.15", since="1.9")
    assert not way.holds("1.8")


@pytest.mark.skipif(
    "OLD_TORCH" not in os.environ, reason="names a Python that has torch before 1.9"
)
def test_what_torch_did_before_1_9() -> None:
    """Two workers, two epochs of four samples: as many different numbers as one worker draws."""
    count = "print(len({n.item() for _ in range(2) for batch in loader for n in batch}))\n"
    for text, numbers in ((RULE.bad, 2), (RULE.good, 8)):
        words = [os.environ["OLD_TORCH"], "-c", text + count]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == numbers
