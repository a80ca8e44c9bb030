"""Settings that test ranks inherit."""

import gc
from multiprocessing.util import register_after_fork

from tests.processes import run_ranks


def test_ranks_do_not_destroy_what_their_parent_has_left():
    """An example is a process group, whose destructor would wait for threads that only the parent has."""
    destroyed = []

    class Left:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            destroyed.append(self)

    gc.disable()
    try:
        Left()
        register_after_fork(Left, lambda _: gc.collect())  # before the rank's first line
        assert run_ranks(1, lambda rank: (gc.collect(), len(destroyed))[1], backend=None) == [0]
    finally:
        gc.enable()
