"""A problem that every rank sees another part of: masked tokens, very different counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import Whole, distance

WIDTH, VOCABULARY, LENGTH = 8, 12, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Model(nn.Module):
    """Two blocks, and a branch that only micro-batches with a mark use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, branch: bool = False) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if branch:
            x = x + self.sometimes(x)
        out: Tensor = self.read(x)
        return out


def fresh() -> Model:
    torch.manual_seed(4)
    return Model().double()


def wrapped(engine: str) -> Any:
    model = fresh()
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


Micro = dict[str, Any]
Errors = dict[str, float]


def micro(seed: int, samples: int, *, branch: bool = False) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    counted = torch.randint(0, LENGTH + 1, (samples, 1), generator=generator)
    counted[0] = max(1, int(counted[0]))
    return {
        "tokens": tokens,
        "labels": labels.masked_fill(torch.arange(LENGTH) >= counted, -100),
        "branch": branch,
    }


SIZES: dict[str, Any] = {
    "tokens": lambda rank: [[1 + 2 * rank, 3, 1], [2, 1, 4 * rank + 1]],
    # Another number of micro-batches on every rank.
    "counts": lambda rank: [[2] * (1 + rank % 3), [1] * (3 - rank % 2)],
    "tail": lambda rank: [[2, 1, 3], [1 + rank]],
    # Rank 0 runs out of data two windows early.
    "exhausted": lambda rank: [[2, 1, 1]] * (1 if rank == 0 else 3),
    # A branch that only the first micro-batch uses.
    "unused": lambda rank: [[2, 1, 3], [1, 1, 2]],
}


def micros_of(case: str, rank: int) -> list[list[Micro]]:
    """Return the windows of this rank, each a list of micro-batches."""
    branches = case == "unused" and rank == 0
    return [
        [
            micro(1000 * rank + 10 * w + i, samples, branch=branches and i == 0)
            for i, samples in enumerate(window)
        ]
        for w, window in enumerate(SIZES[case](rank))
    ]


def joined(window: list[Micro]) -> Micro:
    """Return the micro-batches of a window as one whole batch (the branch is per batch)."""
    names = ("tokens", "labels")
    return {**{name: torch.cat([m[name] for m in window]) for name in names}, "branch": False}


def loss(model: nn.Module, m: Micro) -> wb.Loss:
    return wb.cross_entropy(model(m["tokens"], m["branch"]), m["labels"])


def global_mean(model: nn.Module, micros: list[Micro]) -> Tensor:
    """The loss of the undivided global batch, by plain torch."""
    logits = torch.cat([model(m["tokens"], m["branch"]).flatten(0, 1) for m in micros])
    labels = torch.cat([m["labels"].flatten() for m in micros])
    return functional.cross_entropy(logits, labels)


def undivided(windows: list[list[Micro]], clip_norm: float | None, make: Any) -> Whole:
    """One process on the undivided global batches: `windows[i]` are those of all ranks."""
    whole = Whole(fresh(), make, loss=global_mean, clip_norm=clip_norm)
    for window in windows:
        whole.step(window)
    return whole


def everyones(mine: list[list[Micro]]) -> list[list[Micro]]:
    """Per window, the micro-batches of all ranks (a rank may have fewer windows)."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [
        [m for theirs in gathered if window < len(theirs) for m in theirs[window]]
        for window in range(max(map(len, gathered)))
    ]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class SeenFull:
    """The gradients that each optimizer step saw, gathered from their slices."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[list[Tensor | None]] = []
        parameters = list(model.parameters())
        optimizer.register_step_pre_hook(
            lambda *_: self.steps.append(
                [None if p.grad is None else full(p.grad).clone() for p in parameters]
            )
        )


def apart(gradients: list[Tensor | None], right: list[Tensor]) -> float:
    """Return the relative distance; no gradient is one of zeros."""
    pairs = zip(gradients, right, strict=True)
    return distance([torch.zeros_like(r) if g is None else g for g, r in pairs], right)


def errors(model: nn.Module, recorded: SeenFull, whole: Whole) -> Errors:
    """Relative L2 distance of the gradients of every step, and of the whole update."""
    final = [full(p.detach()) for p in model.parameters()]
    start = list(whole.start.parameters())
    update = [a - b.detach() for a, b in zip(final, start, strict=True)]
    right = whole.seen.gradients
    assert len(recorded.steps) == len(right), (
        f"{len(recorded.steps)} updates instead of {len(right)}"
    )
    worst = max(apart(*pair) for pair in zip(recorded.steps, right, strict=True))
    return {"gradients": worst, "update": distance(update, whole.updates())}


def outcome(call: Callable[[], Any]) -> str:
    """Return the error that wholebatch raises in a call; or "accepted", and what it logs."""
    said = ["accepted"]
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wholebatch").addHandler(handler)
    try:
        call()
    except wb.errors.WholebatchError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("wholebatch").removeHandler(handler)
    return "\n".join(said)
