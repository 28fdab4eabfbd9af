"""Processes that were restarted agree on a name that no dead one has, in a store that kept all."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from wholebatch.cli.parallel_ranks import agree_on_attempt
from wholebatch.errors import RankError


def attempt(store: dist.Store, late: list[float]) -> list[str]:
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        time.sleep(late[rank])
        found[rank] = agree_on_attempt(store, rank=rank, ranks=len(late), timeout=60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(late))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(late))]


def test_every_attempt_has_a_name_of_its_own_that_all_ranks_share() -> None:
    store = dist.HashStore()
    names = []
    for late in ([0.0, 0.2, 0.1], [0.3, 0.0, 0.1], [0.1, 0.3, 0.0], [0.0, 0.1], [0.2, 0.0, 0.0]):
        shared = set(attempt(store, late))
        assert len(shared) == 1
        names += shared
    assert len(set(names)) == len(names)


def test_a_rank_that_died_while_joining_leaves_only_what_the_next_attempt_replaces() -> None:
    store = dist.HashStore()
    with pytest.raises(RankError, match="rank 1 waited 0 s for the other 1 ranks to start"):
        agree_on_attempt(store, rank=1, ranks=2, timeout=0.05)
    with pytest.raises(RankError):  # this one has read the name that rank 1 left
        agree_on_attempt(store, rank=0, ranks=2, timeout=0.3)
    assert len(set(attempt(store, [0.0, 0.3]))) == 1
