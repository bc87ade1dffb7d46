"""Each exit code means one thing."""

from flambeau.parallel import preemption
from flambeau.parallel.watchdog.watchdog import LOST_PEER


def test_no_two_endings_share_an_exit_code() -> None:
    """A machine that computes wrong once left with 76, which the launcher takes for a lost peer."""
    codes = [
        preemption.EXIT_CODE,
        preemption.OUT_OF_MEMORY,
        preemption.FAULTY_MACHINE,
        preemption.INTERRUPTED,
        LOST_PEER,
    ]
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2} & set(codes)
