"""A run put into a checkpoint and taken out again, on one rank or many.

A checkpoint holds the model, the optimizer, the progress, the place in the data, and of every rank
what is its own: its random generators, and the micro-batch that fits its memory. The first rank
writes it; a sharded model's slices are written by all. It is read back on any number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.cli.checkpoints import (
    Checkpoints,
    Found,
    check_model,
    check_optimizer,
    put_together,
    take_apart,
    write_slices,
)
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.training_engines import Staged, Zero
from wholebatch.cli.training_run import Session, seed_generators
from wholebatch.errors import StateError

# Of the progress, what is the same on all ranks; the rest is each one's own.
_SHARED = frozenset(
    {"format", "kind", "updates", "skipped", "next_seed", "scaler", "schedulers", "ema"}
)


def save_run(session: Session, checkpoints: Checkpoints) -> Path:
    """Write a checkpoint of this moment: all ranks call it, after the same window."""
    world, engine = session.world, session.engine
    progress = session.train.state_dict()
    data = {**session.batches.state_dict(session.position), **session.pace.state_dict()}
    data["losses"] = session.spikes.recent
    state: dict[str, Any] = {"recipe": session.recipe.name, "train": progress, "data": data}
    if world.ranks > 1:
        state["ranks"] = world.gathered(_own(progress, world))
    if engine is not None:
        state["engine"] = engine.about
    if world.is_sharded or isinstance(engine, Zero):
        return _save_sharded(session, checkpoints, state)
    if isinstance(engine, Staged):
        state.update(engine.gathered())
    elif world.is_first:
        state.update(_states(session))
    if not world.is_first:
        return checkpoints.folder
    return checkpoints.save(state, windows=session.windows)


def _states(session: Session) -> dict[str, Any]:
    return {"model": session.model.state_dict(), "optimizer": session.optimizer.state_dict()}


def _save_sharded(session: Session, checkpoints: Checkpoints, state: dict[str, Any]) -> Path:
    world, engine, windows = session.world, session.engine, session.windows
    writing, path = checkpoints.sharded(windows)

    def begin() -> bool:
        if path.exists():  # of this very window: nothing has happened since
            return False
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        return True

    if not world.first(begin):
        return path
    if isinstance(engine, Zero):
        engine.write(writing)
        world.gathered(True)  # every rank has written
    else:
        state, slices = take_apart({**state, **_states(session)})
        write_slices(writing, slices)
    if world.is_first:
        checkpoints.publish(state, windows=windows)
    return path


def restore_run(session: Session, found: Found) -> None:
    """Go on from a checkpoint; a StateError when it does not belong to this recipe."""
    state, world = found.state, session.world
    if _is_of_deepspeed(state) or isinstance(session.engine, Zero):
        _load_deepspeed(session.engine, found)
    else:
        _load_states(session, found)
    session.batches.load_state_dict(state["data"])
    progress, known = _progress_here(state, world)
    session.train.load_state_dict(progress)  # last: it puts the random generators back
    if not known:
        # A rank that was not there before: seeded by its number and the place.
        mixed = (session.config.seed * 1_000_003 + world.rank) * 1_000_003 + session.windows
        seed_generators(mixed % 2**63)
    session.position = session.batches.position
    session.pace.load_state_dict(state["data"])
    session.spikes.recent = list(state["data"].get("losses", []))


def _load_states(session: Session, found: Found) -> None:
    """Load model and optimizer, laid out as this job lays them out."""
    state, model, optimizer = found.state, session.model, session.optimizer
    missing = {"model", "optimizer", "train", "data"} - state.keys()
    if missing:
        raise StateError(f"{found.path} is damaged: it has no {', '.join(sorted(missing))}")
    own = model.state_dict()
    places: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]

    def like(path: tuple[Any, ...]) -> Tensor | None:
        if path[0] == "model":
            tensor: Tensor | None = own.get(path[1])
            return tensor
        if path[:2] == ("optimizer", "state") and path[2] < len(places):
            place: Tensor = places[path[2]]
            return place
        return None

    if session.world.is_sharded or found.path.is_dir():
        both = {name: state[name] for name in ("model", "optimizer")}
        state = {**state, **put_together(both, found.path, like=like)}
    check_model(model, state["model"], where=str(found.path))
    try:
        if isinstance(session.engine, Staged):
            session.engine.load(state)
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            check_optimizer(optimizer, where=str(found.path))
    except StateError:
        raise
    except (ValueError, KeyError, RuntimeError) as error:
        raise StateError(f"{found.path} does not fit this recipe's optimizer: {error}") from error


def _is_of_deepspeed(state: dict[str, Any]) -> bool:
    return bool(state.get("engine", {}).get("name") == "deepspeed")


def _load_deepspeed(engine: Zero | Staged | None, found: Found) -> None:
    """Load DeepSpeed's files, which are for the same stage on as many ranks."""
    there = found.state.get("engine", {})
    if isinstance(engine, Zero) and engine.about == there:
        engine.load(found.path)
    elif _is_of_deepspeed(found.state):
        raise StateError(
            f"{found.path} was written by DeepSpeed: go on with --parallel deepspeed --zero "
            f"{there['zero']} on {there['ranks']} ranks"
        )
    else:
        raise StateError(
            f"{found.path} was not written by DeepSpeed: go on without --parallel deepspeed"
        )


def _own(progress: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the progress that differs between ranks."""
    own = {name: value for name, value in progress.items() if name not in _SHARED}
    generators = own["random"] = dict(progress["random"])
    if "cuda" in generators:
        generators["cuda"] = [generators["cuda"][world.device.index or 0]]
    return own


def _progress_here(state: dict[str, Any], world: World) -> tuple[dict[str, Any], bool]:
    """Return the saved progress of this rank, and True if the checkpoint knows this rank."""
    progress: dict[str, Any] = dict(state["train"])
    saved = state.get("ranks")
    if saved is None and world.ranks == 1:
        return progress, True
    everyones = saved or [{}]
    known = world.rank < len(everyones)
    progress.update(everyones[world.rank if known else 0])
    generators = dict(progress["random"])
    own = generators.pop("cuda", None)
    if own is not None and torch.cuda.is_available():
        here = torch.cuda.get_rng_state_all()
        here[world.device.index or 0] = own[0]
        generators["cuda"] = here
    progress["random"] = generators
    return progress, known
