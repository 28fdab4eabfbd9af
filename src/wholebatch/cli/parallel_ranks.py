"""The ranks of a run under torchrun: what they agree on, and how the model is spread over them.

One process is a world of one: every method then does the plain thing, without a collective.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from wholebatch.distributed.process_group import Group, shorten_timeout, world_size
from wholebatch.errors import OptionError, RankError, WholebatchError
from wholebatch.memory.activation_checkpointing import repeated_blocks

T = TypeVar("T")

_LEAST_TIMEOUT = 300.0
_TIMES_FIRST_WINDOW = 20.0


class World:
    """The processes that train together, seen from one of them."""

    def __init__(
        self,
        rank: int,
        *,
        device: torch.device,
        parallel: str = "ddp",
    ) -> None:
        self.rank = rank
        self.device = device
        self.ranks = world_size()
        self.is_first = rank == 0
        self.asked = parallel
        self.parallel = parallel if self.ranks > 1 else "ddp"
        self.is_sharded = self.parallel == "fsdp2"
        # A pipeline is one model: every rank has every batch, and its own stages.
        self.shares = 1 if self.parallel == "pipeline" else self.ranks
        self.share = 0 if self.parallel == "pipeline" else rank
        self._group = Group([None], device, rank=rank) if self.ranks > 1 else None

    # -------------------------------------------------------------- agreeing

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        return flag if self._group is None else self._group.sum([float(flag)])[0] > 0

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, which may be what a checkpoint may hold."""
        if self.ranks == 1:
            return [value]
        sent = io.BytesIO()  # as an archive: torch's tensors in plain pickles do not always load
        torch.save(value, sent)
        received: list[Any] = [None] * self.ranks
        dist.all_gather_object(received, sent.getvalue())
        return [torch.load(io.BytesIO(one), weights_only=True) for one in received]

    def first(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes, on all ranks; its error ends all of them."""
        if self.ranks == 1:
            return make()
        value, error = _tried(make) if self.is_first else (None, None)
        sent: list[Any] = [(value, error is not None)]
        dist.broadcast_object_list(sent, src=0)
        if error is not None:
            raise error
        made, failed = sent[0]
        if failed:
            raise SystemExit(2)
        result: T = made
        return result

    def together(self, make: Callable[[], T]) -> T:
        """Return what this rank makes, once every rank has; the first with an error tells it."""
        if self.ranks == 1:
            return make()
        value, error = _tried(make)
        failed = [rank for rank, has in enumerate(self.gathered(error is not None)) if has]
        if failed and (error is None or self.rank != failed[0]):
            raise SystemExit(2)
        if error is not None:
            if self.rank and isinstance(error, WholebatchError):
                raise RankError(f"rank {self.rank}: {error}") from error
            raise error
        return cast(T, value)

    # -------------------------------------------------------------- the model

    def spread(self, model: nn.Module) -> nn.Module:
        """Return the model over the ranks: replicated (DDP), or sharded block by block (FSDP2)."""
        if self.ranks == 1:
            return model
        if not self.is_sharded:
            from torch.nn.parallel import DistributedDataParallel

            on = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(model, device_ids=on)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.ranks,))
        for name in repeated_blocks(model):
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    # --------------------------------------------------------------- failing

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Say in one line that this rank only lost the others; torchrun ends it anyway."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks == 1 or not _is_of_a_collective(error):
                raise
            text = str(error).strip().split("\n")[0]
            raise RankError(
                f"rank {self.rank} lost the other ranks, or one hangs: {text}"
            ) from error

    def first_window_made(self, seconds: float) -> None:
        """Let a rank that hangs from now on end the job; the first window took so many seconds."""
        if self.ranks > 1:
            shorten_timeout(max(_LEAST_TIMEOUT, _TIMES_FIRST_WINDOW * seconds))


def _is_of_a_collective(error: RuntimeError) -> bool:
    """True if torch's collectives raised it: gloo raises a plain RuntimeError in torch's code."""
    if isinstance(error, WholebatchError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    innermost = Path(frames[-1].filename) if frames else Path()
    return isinstance(error, dist.DistError) or Path(dist.__file__).parent in innermost.parents


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


_TIMEOUT = 600.0


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA where there is one. Refuse one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            there = f"there are {count} CUDA devices" if count else "there is no CUDA device here"
            raise OptionError(f"--device {name}: {there}")
    return device


@contextmanager
def process_group(device: str) -> Iterator[tuple[int, torch.device]]:
    """Join the ranks of torchrun; give this process's rank and device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    where = choose_device(device)
    if size == 1:
        yield 0, where
        return
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    mine = not torch.distributed.is_initialized()
    if mine:
        _join("nccl" if where.type == "cuda" else "gloo")
    try:
        yield torch.distributed.get_rank(), where
    finally:
        if mine and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            gc.collect()  # models still hold the group, whose threads end with it: now, not at exit


def _join(backend: str) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        torch.distributed.init_process_group(backend)
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # Torchrun keeps its store over restarts, and nothing in it tells an attempt from the one
    # before: ranks would read addresses of processes that are dead (pytorch issue 135712), and
    # TORCHELASTIC_RESTART_COUNT is not the same on all machines. So they agree on a name.
    store, rank, size = next(rendezvous("env://"))
    attempt = agree_on_attempt(store, rank=rank, ranks=size)
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore(f"wholebatch/{attempt}", store),
        rank=rank,
        world_size=size,
    )


def agree_on_attempt(store: Any, *, rank: int, ranks: int, timeout: float = _TIMEOUT) -> str:
    """Return a name that only the processes alive now share, from a store with old entries.

    Every rank writes a name of its own. The first one calls the roll of what it reads; a rank
    that finds its name on it says that it has seen this very roll. Old processes have not: when
    all ranks have seen it, all names on it are of the living. Until then the roll is called again
    whenever a name has changed.
    """
    own = uuid.uuid4().hex
    store.set(f"wholebatch/here/{rank}", own)
    called = seen = ""
    pause, until = 0.005, time.monotonic() + timeout
    while time.monotonic() < until:
        if rank == 0:
            here = ",".join(_read(store, "here", ranks))
            if here != called:
                store.set("wholebatch/roll", called := here)
        [roll] = _read(store, "roll")
        attempt = hashlib.sha256(roll.encode()).hexdigest()[:16]
        names = roll.split(",")
        if len(names) == ranks and names[rank] == own:
            if attempt != seen:
                store.set(f"wholebatch/seen/{rank}", seen := attempt)
            if rank == 0 and set(_read(store, "seen", ranks)) == {attempt}:
                store.set("wholebatch/go", attempt)
            if _read(store, "go") == [attempt]:
                return attempt
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
    raise RankError(f"rank {rank} waited {timeout:.0f} s for the other {ranks - 1} ranks to start")


def _read(store: Any, what: str, ranks: int | None = None) -> list[str]:
    """Return entries of the store, "" where there is none; with `ranks`, one of every rank."""
    keys = [f"wholebatch/{what}"]
    if ranks is not None:
        keys = [f"{keys[0]}/{rank}" for rank in range(ranks)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
