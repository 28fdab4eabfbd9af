"""Train a task through a interface, and say what was wrong with how a planted mistake was met."""

from __future__ import annotations

import logging
import random
import re
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.mistakes import kinds, models, sequences
from tests.mistakes.interfaces import INTERFACES
from tests.mistakes.planted import Mistake
from tests.mistakes.task import Task, flat, trajectory

SOURCES = (models, sequences)  # importing them fills the list of kinds
# Advice of the hosts about their own machinery.
HOSTS = r"lightning|transformers|accelerate|dataloader|pin_memory|LeafSpec|treespec|isinstance"


@dataclass(frozen=True)
class Outcome:
    """What a interface said while it trained, and the parameters that it left."""

    error: str | None
    warned: list[str]
    end: Tensor


class Logged(logging.Handler):
    """Collects what the library warns of by logging."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(task: Task, interface: str, sizes: list[int], windows: int = 1) -> Outcome:
    error = None
    logged = Logged()
    logging.getLogger("wholebatch").addHandler(logged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(11)
        try:
            INTERFACES[interface](task, sizes, windows)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            logging.getLogger("wholebatch").removeHandler(logged)
    # Exact BatchNorm says that it does not split the batch.
    lines = [line for line in logged.lines if "so the batch is not split" not in line]
    warned = lines + [str(one.message) for one in caught if not of_a_host(one)]
    return Outcome(error, warned, flat(task.model))


def of_a_host(warning: warnings.WarningMessage) -> bool:
    found = f"{warning.category.__module__} {warning.filename} {warning.message}"
    # A warning of the library points at the line that called it, which may be a host's.
    is_own = re.search("micro-batch|number of steps", str(warning.message)) is not None
    return re.search(HOSTS, found) is not None and not is_own


def split(interface: str, samples: int, draw: random.Random) -> list[int]:
    """Uneven sizes of micro-batches that add up to the batch.

    `WholeBatch` sees all samples. Other interfaces test the first micro-batch: it has four samples
    or more, because what two of them do to each other may be nothing.
    """
    if interface == "WholeBatch":
        return [draw.randint(3, 7)]
    sizes = [draw.randint(4, 6), *(draw.randint(1, 3) for _ in range(draw.randint(1, 2)))]
    return [*sizes, samples - sum(sizes)]


def off(end: Tensor, states: list[Tensor], at: int) -> float:
    """Distance to the truth after update `at`, relative to the length of that update."""
    length = float((states[at] - states[at - 1]).norm()) if at else float(states[0].norm())
    return float((end - states[at]).norm()) / length if length else float((end != states[at]).any())


def complaint(mistake: Mistake, kind: str, interface: str, seed: int) -> str | None:
    """None where the mistake was named in time, or the update is exact all the same."""
    draw = random.Random(f"{mistake.name} {interface} {kind} {seed}")

    def planted() -> Task:
        task = kinds.task(kind, seed)
        return mistake.plant(task.but(steps=len(sizes)))

    samples = len(next(iter(kinds.task(kind, seed).batch.values())))
    sizes = split(interface, samples, draw)
    if interface == "WholeBatch" and mistake.samples is not None:
        sizes = [mistake.samples]
    torch.manual_seed(11)
    states = trajectory(planted(), mistake.windows)
    task = planted()
    outcome = train(task, interface, sizes, mistake.windows)
    said = "\n".join([outcome.error or "", *outcome.warned])
    where = f"{mistake.name} | {interface} | {kind} {seed} {sizes}"
    distance = off(outcome.end, states, mistake.windows)
    if outcome.error is None and distance <= task.tolerance and not task.random:
        return None
    if outcome.error is None and not outcome.warned:
        return f"unseen: {where}: the update is {distance:.1e} off"
    if not re.search(mistake.words, said, re.IGNORECASE | re.DOTALL):
        return f"seen, not named: {where}: {said.strip()[:400]}"
    earlier = min(off(outcome.end, states, at) for at in range(mistake.windows))
    comparable = not mistake.moves and not (task.random and mistake.windows > 1)
    if outcome.error is not None and earlier > task.tolerance and comparable:
        return f"seen too late: {where}: parameters moved {earlier:.1e}: {said.strip()[:300]}"
    return None


def kinds_for(mistake: Mistake, interface: str) -> list[str]:
    """The kinds of models that a mistake can be planted in, for this interface."""
    names = set(kinds.KINDS) if mistake.only is None else set(mistake.only)
    if interface not in ("WholeBatch", "by hand"):
        names -= kinds.WITH_BATCHNORM
    return sorted(names - mistake.never)
