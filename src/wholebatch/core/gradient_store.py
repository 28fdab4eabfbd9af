"""Where the gradients of a window go as they are made, and how they reach the update.

A window asks its store, and nothing else, where a micro-batch's gradient goes and where the close
finds it. Which memory a window needs beside parameters, activations and optimizer state is the
store's affair alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.distributed import Sync
from wholebatch.errors import LossError, StateError, WindowError
from wholebatch.offload.close_on_device import Ahead, Numbers, Sums
from wholebatch.offload.partial_steps import refuse_foreign_code
from wholebatch.offload.undo_step import Before

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["Store", "refuse_stray"]


class Store(ABC):
    """One way to keep the gradients of an open window, and to make the update from them."""

    option: str = 'gradients="device"'
    """How the user asks for this store."""

    steps_on_all: bool = False
    """True if an optimizer's step finds the whole gradient in `.grad`."""

    in_grad: bool = True
    """Whether they are in `.grad`, where a last backward may reduce them over the ranks."""

    only_eager: str | None = None
    """Why no compiled graph may run a micro-step; None where one may."""

    counts_first: bool = False
    """Whether the units of a window must be known before its first backward."""

    approximate: str | None = None
    """How the update differs from that of the undivided batch; None: it does not."""

    after_failure: str = (
        "parameters and optimizer state are as before this window; pass nonfinite='skip' to skip "
        "and count such updates"
    )
    """What a window leaves behind whose gradients turned out not to be finite."""

    at_once: bool = False
    """Whether an optimizer's step is one step on all of its parameters."""

    counts_changes: bool = True
    """Whether torch's counts of changes tell how far a step has come."""

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        self.target = target
        self.options = options
        self.sync = sync
        self.parameters: list[nn.Parameter] = []
        self.spoiled: list[tuple[nn.Parameter, int]] = []
        self._hooked: dict[int, Any] = {}  # parameters that are looked at, by id

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        """A window opens; none of these parameters holds a gradient.

        `known`: the units of each term over the whole window and all ranks, where counted before.
        """
        if not self.steps_on_all:  # they may have been added since the store was chosen
            refuse_foreign_code(self.target.optimizers, self.option)
        if any(parameter._version == version for parameter, version in self.spoiled):
            raise WindowError(
                "an earlier window failed after some of its parameters had been updated, or may "
                "have been: load the model and the optimizer from the last checkpoint before going "
                "on"
            )
        self.spoiled = []
        self.parameters = parameters

    def hook(self, made: Callable[[Tensor], None]) -> None:
        """Until the window is over, call `made(parameter)` when a backward has made its `.grad`."""
        self._unhook()
        for parameter in self.parameters:
            self._hooked[id(parameter)] = parameter.register_post_accumulate_grad_hook(made)

    def look_away(self, parameter: Tensor) -> None:
        """This parameter's `hook` is over: layers add to its `.grad` themselves."""
        self._hooked.pop(id(parameter)).remove()

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def check_total(self, total: Tensor) -> None:
        """Refuse a total whose seed would be rounded, where nothing can be put right later."""
        if self.counts_first and total.dtype in SIXTEEN_BIT:
            raise LossError(
                f"a total of dtype {total.dtype}: 1 / units would be rounded to its few bits, and "
                "these gradients cannot be put right at the close; return a float32 sum"
            )

    def before_backward(self, last: bool, totals: Numbers, units: Numbers) -> bool:
        """Whether to run a backward; `last`: each gradient that it makes is final at once.

        `totals` and `units` are those of the window so far, by term, this backward's included.
        """
        return True

    def backward_made(self) -> None:
        """A backward is over, and every gradient that it makes is made."""
        return

    def reduce_now(self) -> None:
        """The close begins, and no backward has reduced what is in `.grad`."""
        if self.in_grad:
            self.sync.reduce_now(self.parameters)

    def absent(self) -> set[int]:
        """Parameters, by id, for which this rank has made no gradient."""
        return self.sync.filled_in()

    def drop(self, parameter: nn.Parameter) -> None:
        """No rank has made a gradient for it: it is to have none."""
        parameter.grad = None

    def refuse_nothing(self) -> None:
        """Refuse a window that has made no gradient at all, where that can be told."""
        return

    def close_ahead(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        sums: Sums,
        hooks: DeferredHooks,
        while_waiting: Callable[[], None] | None,
    ) -> Ahead | None:
        """The whole close on the device, read afterwards; None where the host must decide."""
        return None

    @abstractmethod
    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        """Bring the gradients to what the optimizer must see."""

    def check_hand_over(self) -> None:
        """Refuse to leave the gradients to the user where they are never whole in `.grad`."""
        raise WindowError(
            f"gradient() with {self.option}: the whole gradient is not left in .grad there; use "
            'gradients="device", or on_gradient= where it is allowed'
        )

    def hand_over(self, remaining: float) -> None:
        """Leave the gradients in `.grad` to the user, times what they are still to get."""
        self.check_hand_over()

    def update(self, remaining: float) -> None:
        """`step`; where it runs out of memory, all of it is undone, or what is left is said."""
        before = self.before_step()
        try:
            self.step(remaining)
            return
        except torch.OutOfMemoryError as error:
            failure = str(error)  # only its text: the traceback holds what has been allocated
        self.failed_in_step(before, failure)

    @abstractmethod
    def step(self, remaining: float) -> None:
        """One step of every optimizer; `remaining` is what the gradients are still to get."""

    def before_step(self) -> Before:
        """What tells, should the step fail, how far it has come."""
        return Before(self.target.optimizers, self.parameters, at_once=self.at_once)

    def failed_in_step(self, before: Before, failure: str) -> NoReturn:
        """A step has run out of memory: put back what can be, and say what cannot."""
        left = before.undo()
        first_line = failure.strip().partition("\n")[0]
        ran_out = f"the optimizer's step ran out of memory ({first_line or 'no reason given'})"
        unsure = left.unknown or not self.counts_changes
        if not left.changed and not unsure and self.sync.ranks == 1:
            raise torch.OutOfMemoryError(
                f"{ran_out} before it had changed anything: parameters and optimizer state are as "
                "before this window, and the run can go on once there is room for the optimizer's "
                "state and its copies of the gradients. fused=True makes no such copies, "
                'gradients="host" takes the gradients away, and a smaller micro-batch leaves less '
                "scattered memory"
            )
        self.spoiled = [(parameter, parameter._version) for parameter in self.parameters]
        if left.changed:
            what = f"after it had changed {left.changed} of {len(self.parameters)} parameters"
        elif unsure:
            what = "when it may have changed parameters or optimizer state already"
        else:
            what = "here, and other ranks may have made theirs"
        raise torch.OutOfMemoryError(
            f"{ran_out} {what}, which cannot be put back: load the model and the optimizer from "
            "the last checkpoint before going on"
        )

    @abstractmethod
    def saved(self) -> Any:
        """What an open window holds, for a checkpoint."""

    def check(self, saved: Any) -> None:
        """Refuse what a store of another kind has saved."""
        if not isinstance(saved, list):
            raise StateError(
                "the saved window's gradients are in the optimizer's moments: resume with the same "
                'gradients="moments"'
            )

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Put `saved` into a window that has just been opened."""

    def discard(self) -> None:
        """The window is over: let go of what it holds."""
        self._unhook()
        for parameter in self.parameters:
            parameter.grad = None
        self.parameters = []


def refuse_stray(target: Target) -> None:
    """Refuse gradients that the window would add to although it has not made them."""
    for group in target.groups():
        for parameter in group:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or bool(gradient.any()):
                raise WindowError(
                    f"{target.name_of(parameter)} already holds a gradient that this window did "
                    "not make (one that gradient() has left is to be used and cleared), and it "
                    "would be added in: call optimizer.zero_grad() first, or give that loss to the "
                    "window too (backward(..., more=True))"
                )
            parameter.grad = None
