"""Reports on many functions from one job for each number of ranks: starting it takes longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from wholebatch.split_invariance import SplitReport, check, split_invariance
from wholebatch.split_invariance.observed_run import Observed, Run, Train, observe
from wholebatch.split_invariance.rank_jobs import observe_on


class SharedJobs:
    """What functions show in these runs, on these numbers of ranks; a lone rank is this process."""

    def __init__(
        self, trains: dict[str, Train], sizes: Sequence[int], ranks: Sequence[int], **options: bool
    ) -> None:
        self._trains, self._sizes, self._ranks = trains, tuple(sizes), tuple(ranks)
        runs = [Run(size) for size in sizes]
        runs += [Run(size, watches=True) for size in sizes if options.get("watches")]
        self._shown: dict[Any, list[Observed]] = {}
        for number in ranks:
            jobs = [(name, run) for name in trains for run in runs]
            called = [(trains[name], run) for name, run in jobs]
            alone = number == 1
            found = [[observe(*job)] for job in called] if alone else observe_on(number, called)
            self._shown |= {
                (number, *job): of_ranks for job, of_ranks in zip(jobs, found, strict=True)
            }

    def report(self, name: str, ranks: Sequence[int], **options: Any) -> SplitReport:
        """Return the report on a function."""

        def observe_shown(number: int, jobs: Sequence[Any]) -> list[list[Observed]]:
            return [self._shown[number, name, run] for _, run in jobs]

        with mock.patch.object(check, "observe_on", observe_shown):
            return split_invariance(
                self._trains[name], micro_batches=self._sizes, ranks=ranks, **options
            )
