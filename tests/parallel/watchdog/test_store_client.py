"""A store that answers, one that fails and one that hangs, in memory."""

import threading
import time
from typing import NoReturn

import pytest
from torch.distributed import HashStore

from flambeau.parallel.watchdog.store_client import StoreClient, StoreLost


def _fail(error: Exception) -> NoReturn:
    raise error


def test_answers_come_from_the_store_under_the_prefix() -> None:
    store = HashStore()
    client = StoreClient(lambda: store, prefix="start-1", wait_s=20)
    client.call(lambda store: store.set("key", "value"))
    assert client.call(lambda store: store.get("key")) == b"value"
    assert not store.check(["key"])
    assert not StoreClient(lambda: store, prefix="start-2", wait_s=20).call(
        lambda store: store.check(["key"])
    )
    before = threading.active_count()
    client.close()
    assert threading.active_count() == before - 1


def test_an_error_of_the_store_is_its_loss_and_another_is_not() -> None:
    client = StoreClient(HashStore, prefix="", wait_s=20)
    with pytest.raises(StoreLost, match=r"^reset by peer$"):
        client.call(lambda store: _fail(RuntimeError("reset by peer\nframe #0")))
    with pytest.raises(KeyError, match="mine"):
        client.call(lambda store: _fail(KeyError("mine")))
    client.close()


def test_no_connection_is_a_loss() -> None:
    client = StoreClient(lambda: _fail(RuntimeError("refused")), prefix="", wait_s=20)
    with pytest.raises(StoreLost, match="refused"):
        client.call(lambda store: store.check(["key"]))
    client.close()


def test_a_store_that_does_not_answer_is_given_up() -> None:
    client = StoreClient(HashStore, prefix="", wait_s=0.2)
    go_on = threading.Event()
    start = time.monotonic()
    with pytest.raises(StoreLost, match="no answer"):
        client.call(lambda store: go_on.wait(20))
    assert 0.2 <= time.monotonic() - start < 10
    go_on.set()
    client.close()
