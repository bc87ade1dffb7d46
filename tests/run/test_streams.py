"""`Run` on streams: IterableDatasets that are counted, those that save their state, what is said of them."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from flambeau import InputError, Run

NUM, BATCH = 22, 4


class Counted(IterableDataset[Tensor]):
    """Deterministic, up to what it draws from the global generators; shared by workers."""

    def __init__(self) -> None:
        self.read = 0
        self.starts = 0

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.starts += 1
        for number in range(first, NUM, step):
            self.read += 1
            yield torch.tensor([float(number), *torch.rand(2).tolist()])


class Stateful(Counted):
    """Shuffles with a generator of its own, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(0)
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        if not self.order:
            self.order = self.draws.sample(range(NUM), NUM)
            self.at = 0
        while self.at < NUM:
            number = self.order[self.at]
            self.at += 1
            self.read += 1
            yield torch.tensor([float(number), *torch.rand(2).tolist()])
        self.order = []

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.getstate(), "order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.setstate(state["draws"])
        self.order, self.at = list(state["order"]), state["at"]


class Rising(Counted):
    """Each pass is another one, whatever the seeds."""

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1
        for number in range(NUM):
            yield torch.full((3,), number + Rising.passes / 8)
        Rising.passes += 1

    passes = 0


class Stopped(Exception):
    """In the place of a kill."""


def train(
    folder: Path, loader: Any, *, until: int | None = None, accumulate: int = 1, epochs: int = 3
) -> list[list[float]]:
    """The first numbers of each batch that was trained on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    run = Run(
        folder, model, optimizer, loader, duration=f"{epochs}ep", checkpoint_every="1st", seed=7,
        accumulate=accumulate, bar=False,
    )  # fmt: skip
    seen = []
    for _ in run.epochs():
        for batch in run.batches():
            if run.state.step == until:
                run.close()
                raise Stopped
            run.step(mse_loss(model(batch), batch[:, :1]))
            seen.append(batch[:, 0].tolist())
    return seen


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def loader_of(kind: type[IterableDataset[Any]], **settings: Any) -> Any:
    return DataLoader(kind(), batch_size=BATCH, **settings)


# Twenty-two samples are six batches, of two workers three each; stops are within and between epochs.
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", [2, 6, 8])
def test_a_stream_is_counted(tmp_path: Path, until: int, workers: int, accumulate: int) -> None:
    train(tmp_path / "whole", loader_of(Counted, num_workers=workers), accumulate=accumulate)
    with pytest.raises(Stopped):
        train(
            tmp_path / "run",
            loader_of(Counted, num_workers=workers),
            until=until,
            accumulate=accumulate,
        )
    train(tmp_path / "run", loader_of(Counted, num_workers=workers), accumulate=accumulate)
    assert same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("until", [1, 3, 6, 8, 14])
def test_a_stream_with_a_state_goes_on_without_reading_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], until: int, accumulate: int
) -> None:
    whole = train(tmp_path / "whole", loader_of(Stateful), accumulate=accumulate)
    passes = [sorted(itertools.chain.from_iterable(whole[k : k + 6])) for k in (0, 6, 12)]
    assert passes == [[float(number) for number in range(NUM)]] * 3
    if until >= len(whole) // accumulate:
        until -= 6
    with pytest.raises(Stopped):
        train(tmp_path / "run", loader_of(Stateful), until=until, accumulate=accumulate)
    loader = loader_of(Stateful)
    rest = train(tmp_path / "run", loader, accumulate=accumulate)
    assert rest == whole[until * accumulate :]
    assert same(tmp_path / "whole", tmp_path / "run")
    assert loader.dataset.read == sum(map(len, rest))
    assert "another one than before" not in capsys.readouterr().err


def test_a_checkpoint_at_the_resume_is_as_good(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", loader_of(Stateful))
    for until in (4, 4, 5):  # stopped again before a batch was read, and after one
        with pytest.raises(Stopped):
            train(tmp_path / "run", loader_of(Stateful), until=until)
    assert train(tmp_path / "run", loader_of(Stateful)) == whole[5:]
    assert same(tmp_path / "whole", tmp_path / "run")


def test_a_state_that_workers_have_is_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="Stateful has a draws=, whose state is in no checkpoint"):
        train(tmp_path / "run", loader_of(Stateful, num_workers=1))


class Seeded(Counted):
    """Has a state, and needs none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is in the workers")


def test_batches_that_a_resume_drops_are_told_where_a_state_would_spare_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "whole", loader_of(Seeded, num_workers=2))
    with pytest.raises(Stopped):
        train(tmp_path / "run", loader_of(Seeded, num_workers=2), until=3)
    train(tmp_path / "run", loader_of(Seeded, num_workers=2))
    assert same(tmp_path / "whole", tmp_path / "run")
    assert "the state of Seeded is in the loader's workers" in capsys.readouterr().err


def test_a_stream_that_is_another_one_after_the_stop_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Rising.passes = 0
    with pytest.raises(Stopped):
        train(tmp_path / "run", loader_of(Rising), until=3)
    Rising.passes = 5
    capsys.readouterr()
    train(tmp_path / "run", loader_of(Rising))
    told = capsys.readouterr().err
    assert told.count("batch 2 of the loader is another one than before the stop") == 1
    with pytest.raises(Stopped):
        train(tmp_path / "other", loader_of(Counted), until=3)
    capsys.readouterr()
    train(tmp_path / "other", loader_of(Counted))
    assert "another one" not in capsys.readouterr().err


class Repeated(IterableDataset[Tensor]):
    """Does not know of workers."""

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3,), float(number)) for number in range(NUM))


class Endless(Repeated):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(3)


class Short(Repeated):
    def __len__(self) -> int:
        return NUM + BATCH


class Drawing(Repeated):
    def __init__(self) -> None:
        self.generator = torch.Generator()


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: loader_of(Repeated, num_workers=2),
            "has 6 batches and makes more: each of its 2 workers reads all of Repeated",
        ),
        (lambda: loader_of(Endless), "has 6 batches and makes more\nLet its __len__ say how many"),
        (lambda: loader_of(Short), "says it has 7 batches and made 6"),
        (lambda: loader_of(Drawing), "Drawing has a generator=, whose state is in no checkpoint"),
    ],
)
def test_what_would_be_wrong_is_refused(
    tmp_path: Path, make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        train(tmp_path / "run", make())


class NotStored(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"order": {1, 2}}


def test_a_state_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"loader\.state\.order"):
        train(tmp_path / "run", loader_of(NotStored))


def test_a_map_style_loader_is_as_before(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(TensorDataset(torch.randn(NUM, 3)), batch_size=BATCH, collate_fn=rows)

    torch.manual_seed(0)
    train(tmp_path / "whole", made := loader())
    with pytest.raises(Stopped):
        train(tmp_path / "run", made, until=8)
    train(tmp_path / "run", made)
    assert same(tmp_path / "whole", tmp_path / "run")


def rows(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row for (row,) in samples])


# ---------------------------------------------------------------- torchdata


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["stream", "rows"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", [3, 6, 8])
def test_torchdatas_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], until: int, workers: int, kind: str
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        if kind == "stream":
            return torchdata.StatefulDataLoader(
                Stateful() if not workers else Plain(), batch_size=BATCH, num_workers=workers
            )
        data = TensorDataset(torch.arange(NUM * 3.0).reshape(NUM, 3))
        return torchdata.StatefulDataLoader(
            data, batch_size=BATCH, num_workers=workers, shuffle=True, collate_fn=rows
        )

    torch.manual_seed(3)
    whole = train(tmp_path / "whole", loader())
    torch.manual_seed(3)
    with pytest.raises(Stopped):
        train(tmp_path / "run", loader(), until=until)
    capsys.readouterr()
    assert train(tmp_path / "run", loader()) == whole[until:]
    assert same(tmp_path / "whole", tmp_path / "run")
    told = capsys.readouterr().err
    assert ("continues by its state, with new workers" in told) == bool(workers and until % 6)


class Plain(Counted):
    """Draws nothing."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.full((3,), float(number)) for number in range(first, NUM, step))


class Batched:
    """A loader of one's own, with a state and `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = self.at = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            self.read += 1
            yield torch.rand(BATCH, 3) + 10 * self.epoch + self.at

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


@pytest.mark.parametrize("until", [1, 5, 6, 7, 12])
def test_a_loader_of_ones_own_with_a_state(tmp_path: Path, until: int) -> None:
    whole = train(tmp_path / "whole", Batched())
    assert [int(batch[0]) for batch in whole] == [10 * k + n for k in range(3) for n in range(1, 7)]
    with pytest.raises(Stopped):
        train(tmp_path / "run", Batched(), until=until)
    loader = Batched()
    assert train(tmp_path / "run", loader) == whole[until:]
    assert loader.read == 18 - until
    assert same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("kind", [Stateful, Counted])
def test_ranks_take_their_share_of_a_stream(
    tmp_path: Path, start_ranks: Callable[..., Any], kind: type[Counted]
) -> None:
    def work(folder: str, until: int | None) -> int:
        loader = loader_of(kind)
        try:
            train(tmp_path / folder, loader, until=until)
        except Stopped:
            return -1
        return int(loader.dataset.read)

    assert set(start_ranks(2, lambda: work("whole", None)).results()) == {3 * NUM}
    assert set(start_ranks(2, lambda: work("run", 8)).results()) == {-1}
    read = set(start_ranks(2, lambda: work("run", None)).results())
    assert read == {3 * NUM - 8 * BATCH + 2 if kind is Stateful else 2 * NUM}
    assert same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_does_not_read_ahead_of_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A checkpoint asks the loader where it stands, which must be where the training does."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Batched()
    run = Run(tmp_path / "run", model, optimizer, loader, duration="1ep", bar=False)
    reader = run._parts.reader
    monkeypatch.setattr(reader, "_device", torch.device("meta"))
    stream = reader.to_device(run._parts.loader.stream(epoch=0, position=0), ahead=ahead)
    for number, micro in enumerate(itertools.islice(stream, 4), start=1):
        assert micro.data.device.type == "meta"
        assert micro.position == number
        assert (loader.read == number) == (not ahead)
    run.close()
