"""The ranks of a run under torchrun: what they agree on, and how the model is spread over them.

One process is a crew of one: every method then does the plain thing, without a collective.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import typer
from torch import nn

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.rank_failure import alarm, is_of_a_collective
from wholebatch.errors import RankError, WholebatchError
from wholebatch.memory.activation_checkpointing import repeated_blocks

__all__ = ["Crew"]

T = TypeVar("T")

_LEAST_DEADLINE = 300.0


class Crew:
    """The processes that train together, seen from one of them."""

    def __init__(
        self,
        rank: int,
        *,
        device: torch.device,
        parallel: str = "ddp",
        deadline: float | None = None,
    ) -> None:
        self.rank = rank
        self.deadline = deadline  # None: by the slowest window, or as the environment says
        self.device = device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.is_first = rank == 0
        self.asked = parallel
        self.parallel = parallel if self.ranks > 1 else "ddp"
        self.is_sharded = self.parallel == "fsdp2"
        # A pipeline is one model: every rank has every batch, and its own stages.
        self.shares = 1 if self.parallel == "pipeline" else self.ranks
        self.share = 0 if self.parallel == "pipeline" else rank
        self._known: Exception | None = None  # an error that all ranks know of already
        self._group = Group([None], device, rank=rank) if self.ranks > 1 else None

    # -------------------------------------------------------------- agreeing

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag if self._group is None else self._group.sum([float(flag)])[0] > 0

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks: what a checkpoint may hold."""
        if self.ranks == 1:
            return [value]
        sent = io.BytesIO()  # as an archive: torch's tensors in plain pickles do not always load
        torch.save(value, sent)
        received: list[Any] = [None] * self.ranks
        dist.all_gather_object(received, sent.getvalue())
        return [torch.load(io.BytesIO(one), weights_only=True) for one in received]

    def first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all; its error ends all of them, and it alone tells it."""
        if self.ranks == 1:
            return make()
        value, error = _tried(make) if self.is_first else (None, None)
        sent: list[Any] = [(value, error is not None)]
        dist.broadcast_object_list(sent, src=0)
        if error is not None:
            self._known = error
            raise error
        made, failed = sent[0]
        if failed:
            raise typer.Exit(2)
        result: T = made
        return result

    def together(self, make: Callable[[], T]) -> T:
        """What this rank makes, once every rank has; the first rank with an error tells it."""
        if self.ranks == 1:
            return make()
        value, error = _tried(make)
        failed = [rank for rank, has in enumerate(self.gathered(error is not None)) if has]
        if failed and (error is None or self.rank != failed[0]):
            raise typer.Exit(2)
        if error is not None:
            self._known = error
            if self.rank and isinstance(error, WholebatchError):
                raise RankError(f"rank {self.rank}: {error}") from error
            raise error
        return cast(T, value)

    # -------------------------------------------------------------- the model

    def spread(self, model: nn.Module) -> nn.Module:
        """The model over the ranks: replicated (DDP), or sharded block by block (FSDP2)."""
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
        """A rank that fails tells the others; one that only lost them says that in one line."""
        if self.ranks == 1:
            yield
            return
        try:
            with alarm().failures():
                yield
        except typer.Exit as stopped:
            if isinstance(stopped.__cause__, Exception):  # told already, by its file and line
                self._tell(stopped.__cause__)
            raise
        except RuntimeError as error:
            if not is_of_a_collective(error):
                self._tell(error)
                raise
            text = str(error).strip().split("\n")[0]
            raise RankError(f"rank {self.rank} lost the other ranks: {text}") from error
        except Exception as error:
            self._tell(error)
            raise

    @property
    def one_hangs(self) -> bool:
        """True if the ranks end because one of them has fallen silent: it says nothing itself."""
        return self.ranks > 1 and alarm().one_hangs

    @contextmanager
    def watched(self, *, advice: str) -> Iterator[None]:
        """Hold every rank to the deadline, also between windows: there is only training here.

        A rank that is ended because another hangs says `advice`.
        """
        if self.ranks == 1:
            yield
            return
        watch = alarm()
        if self.deadline is not None:
            watch.progress.fixed = self.deadline
        watch.progress.least, watch.progress.always = _LEAST_DEADLINE, True
        watch.advice = advice if self.is_first else None
        watch.progress.mark()
        try:
            yield
        finally:
            watch.progress.always, watch.advice = False, None
            watch.progress.pause()

    def _tell(self, error: Exception) -> None:
        if error is self._known:
            return
        alarm().post(error)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3.0)  # the store may live in this process: let the others read it


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error
