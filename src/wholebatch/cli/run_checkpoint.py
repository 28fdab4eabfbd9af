"""A run put into a checkpoint and taken out again, on one rank or many.

A checkpoint holds the model, the optimizer, the progress, the place in the data, and of every rank
what is its own: its random generators, and the micro-batch that fits its memory. The first rank
writes it; a sharded model's slices are written by all. It is read back on any number of ranks.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch import WholeBatch
from wholebatch.cli.checkpoints import (
    Checkpoints,
    Found,
    check_model,
    check_optimizer,
    put_together,
    take_apart,
    write_slices,
)
from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.recipes import Batches
from wholebatch.cli.training_engines import Staged, Zero
from wholebatch.errors import StateError

__all__ = ["Parts", "restore", "save"]

# Of the progress, what is the same on all ranks; the rest is each one's own.
_SHARED = frozenset(
    {"format", "kind", "updates", "skipped", "next_seed", "window", "scaler", "schedulers", "ema"}
)


@dataclass(frozen=True)
class Parts:
    """What a checkpoint is made of, besides the place in the data."""

    recipe: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: WholeBatch | Staged
    engine: Zero | Staged | None = None
    """Who keeps the state of model and optimizer, where they cannot be asked themselves."""

    @property
    def windows(self) -> int:
        return self.train.updates + self.train.skipped


def save(
    parts: Parts,
    crew: Crew,
    checkpoints: Checkpoints,
    *,
    data: dict[str, Any],
    micro_batches: int = 0,
) -> Path:
    """Write a checkpoint of this moment: all ranks call it, at the same window."""
    progress = parts.train.state_dict()
    state: dict[str, Any] = {"recipe": parts.recipe, "train": progress, "data": data}
    if crew.ranks > 1:
        state["ranks"] = crew.gathered(_own(progress, crew))
    if parts.engine is not None:
        state["engine"] = parts.engine.about
    if crew.is_sharded or (parts.engine is not None and parts.engine.writes):
        return _save_sharded(parts, crew, checkpoints, state)
    whole = None if parts.engine is None else parts.engine.gathered()
    if not crew.is_first:
        return checkpoints.folder
    state.update(
        whole or {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    )
    return checkpoints.save(state, windows=parts.windows, micro_batches=micro_batches)


def _save_sharded(
    parts: Parts, crew: Crew, checkpoints: Checkpoints, state: dict[str, Any]
) -> Path:
    writing, path = checkpoints.sharded(parts.windows)

    def begin() -> bool:
        if path.exists():  # of this very window: nothing has happened since
            return False
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        return True

    if not crew.first(begin):
        return path
    if parts.engine is not None:
        parts.engine.write(writing)
        crew.gathered(True)  # every rank has written
        if crew.is_first:
            checkpoints.publish(state, windows=parts.windows)
        return path
    state.update(model=parts.model.state_dict(), optimizer=parts.optimizer.state_dict())
    plain, slices = take_apart(state)
    write_slices(writing, slices)
    if crew.is_first:
        checkpoints.publish(plain, windows=parts.windows)
    return path


def restore(parts: Parts, crew: Crew, found: Found, *, data: Batches, seed: int) -> None:
    """Go on from a checkpoint; a StateError when it does not belong to these parts."""
    state = found.state
    if _is_of_deepspeed(state) or isinstance(parts.engine, Zero):
        _load_engine(parts, state, found)
        _finish(parts, crew, state, data=data, seed=seed)
        return
    missing = {"model", "optimizer", "train", "data"} - state.keys()
    if missing:
        raise StateError(f"{found.path} is damaged: it has no {', '.join(sorted(missing))}")
    own = parts.model.state_dict()
    places: list[Tensor] = [p for group in parts.optimizer.param_groups for p in group["params"]]

    def like(path: tuple[Any, ...]) -> Tensor | None:
        if path[0] == "model":
            tensor: Tensor | None = own.get(path[1])
            return tensor
        if path[:2] == ("optimizer", "state") and path[2] < len(places):
            place: Tensor = places[path[2]]
            return place
        return None

    if crew.is_sharded or found.path.is_dir():
        both = {name: state[name] for name in ("model", "optimizer")}
        state = {**state, **put_together(both, found.path, like=like)}
    check_model(parts.model, state["model"], where=str(found.path))
    try:
        if parts.engine is not None:
            parts.engine.load(state)
        else:
            parts.model.load_state_dict(state["model"])
            parts.optimizer.load_state_dict(state["optimizer"])
            check_optimizer(parts.optimizer, where=str(found.path))
    except StateError:
        raise
    except (ValueError, KeyError, RuntimeError) as error:
        raise StateError(f"{found.path} does not fit this recipe's optimizer: {error}") from error
    _finish(parts, crew, state, data=data, seed=seed)


def _finish(parts: Parts, crew: Crew, state: dict[str, Any], *, data: Batches, seed: int) -> None:
    data.load_state_dict(state["data"])
    progress, known = _progress_here(state, crew)
    parts.train.load_state_dict(progress)  # last: it puts the random generators back
    if not known:
        _seed_late(seed, crew.rank, parts.windows)


def _is_of_deepspeed(state: dict[str, Any]) -> bool:
    return bool(state.get("engine", {}).get("name") == "deepspeed")


def _load_engine(parts: Parts, state: dict[str, Any], found: Found) -> None:
    """DeepSpeed's files are for the same stage on as many ranks."""
    there = state.get("engine", {})
    if not isinstance(parts.engine, Zero) or parts.engine.about != there:
        if not _is_of_deepspeed(state):
            raise StateError(
                f"{found.path} was not written by DeepSpeed: go on without --parallel deepspeed"
            )
        raise StateError(
            f"{found.path} was written by DeepSpeed: go on with --parallel deepspeed --zero "
            f"{there['zero']} on {there['ranks']} ranks"
        )
    parts.engine.load({"path": str(found.path)})


def _own(progress: dict[str, Any], crew: Crew) -> dict[str, Any]:
    """What differs between ranks."""
    own = {name: value for name, value in progress.items() if name not in _SHARED}
    generators = own["random"] = dict(progress["random"])
    if "cuda" in generators:
        generators["cuda"] = [generators["cuda"][crew.device.index or 0]]
    return own


def _progress_here(state: dict[str, Any], crew: Crew) -> tuple[dict[str, Any], bool]:
    """The saved progress as this rank takes it up, and whether the checkpoint knows this rank."""
    progress: dict[str, Any] = dict(state["train"])
    saved = state.get("ranks")
    if saved is None and crew.ranks == 1:
        return progress, True
    if crew.ranks > 1 and progress["window"] is not None:
        # Half a window of one process: begun again, as shares of several ranks.
        progress.update(window=None, done=0)
    everyones = saved or [{}]
    known = crew.rank < len(everyones)
    progress.update(everyones[crew.rank if known else 0])
    generators = dict(progress["random"])
    own = generators.pop("cuda", None)
    if own is not None and torch.cuda.is_available():
        here = torch.cuda.get_rng_state_all()
        here[crew.device.index or 0] = own[0]
        generators["cuda"] = here
    progress["random"] = generators
    return progress, known


def _seed_late(seed: int, rank: int, windows: int) -> None:
    """Generators of a rank that was not there before: seeded by its number and the place."""
    mixed = (seed * 1_000_003 + rank) * 1_000_003 + windows
    torch.manual_seed(mixed % 2**63)
    random.seed(mixed)
