"""Run under torchrun: what a watch finds in loops of several ranks, and that it changes none."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from tests.verification.fixtures import round_20
from tests.verification.fixtures.rounds import CASES, is_right, mlp
from tests.verification.loops.live import found_in, quiet
from wholebatch.verification import watch_loop

HARD = """
    ranks_only_the_first_steps_and_sends ranks_state_of_the_optimizer_shared_out
    ranks_windows_of_other_lengths ranks_weights_averaged_after_a_plain_step
    ranks_reduced_every_time_and_times_the_world ranks_reduced_before_the_last_backward
    ranks_only_the_first_clips ranks_clipped_before_the_reduction ranks_tail_on_the_first_only
    ranks_shards_never_reduced ranks_one_rank_skips_its_last ranks_weights_averaged_after_adam
    ranks_clipped_after_the_reduction ranks_join_of_those_that_are_left
"""
"""Loops of round 20 in plain torch that were hard at first sight, and some like them."""


def trained(lengths: list[int], *, joins: bool, watches: bool) -> tuple[list[Any], str]:
    """Train windows of these lengths on this rank; return the weights and what a watch found."""
    rows = round_20.batches(4 * sum(lengths), 4)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = wb.watch(model, optimizer) if watches else nullcontext()
    with quiet(), watch:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with wrapped.join(divide_by_initial_world_size=False, enable=joins):
            given = iter(rows)
            for length in lengths:
                for place in range(length):
                    micro = next(given)
                    held = wrapped.no_sync() if place + 1 < length else nullcontext()
                    with held:
                        (round_20.mean(wrapped, micro) / length).backward()
                optimizer.step()
                optimizer.zero_grad()
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    return weights, found_in(watch.verdict) if watches else ""  # type: ignore[union-attr]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"rounds": {}, "long": {}}
    with patch.object(watch_loop, "_PATIENCE", 2.0):
        for name in HARD.split():
            _, key, make = CASES[name]
            right = is_right(make)  # type: ignore[no-untyped-call]
            torch.manual_seed(0)
            model, train, _ = make()
            with quiet(), wb.watch(model) as watch:
                train()
            found["rounds"][name] = [found_in(watch.verdict), key, right, str(watch.verdict)]
        for name, lengths, joins in (
            ("a rank ends before the others", ([4] * 6, [4] * 3), True),
            ("windows of other lengths", ([4, 4, 3, 4, 2, 4], [4, 4, 4, 3, 4, 1]), False),
        ):
            plain, _ = trained(lengths[rank], joins=joins, watches=False)
            watched, answer = trained(lengths[rank], joins=joins, watches=True)
            found["long"][name] = [answer, plain == watched]
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
