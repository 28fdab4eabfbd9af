"""Several accumulators in one loop, such as the two of a GAN: what they must not do to each other.

The window of one may end, and its model be updated, while the window of another is open. A loss of
the open window that used the model before and uses it again would mix old and new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from wholebatch.errors import WindowError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.autograd_graph import graph_nodes
from wholebatch.window.ledger import Ledger


class Position(Protocol):
    """Where a member is in its window."""

    items: int

    @property
    def size(self) -> int:
        """The number of items of its window."""

    @property
    def is_item_open(self) -> bool:
        """True in an item whose last backward was not made."""


class Member(Protocol):
    """An accumulator of a loop."""

    @property
    def updates(self) -> int:
        """Updates that it has made."""

    @property
    def _ledger(self) -> Ledger: ...

    @property
    def _progress(self) -> Position: ...


class JointWindows:
    """The windows of the members of one loop."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self.are_several = len(members) > 1
        self._updates: dict[int, list[int]] = {}  # of the others, when a member's window began
        self._guards: list[Any] = []  # hooks on updated models, until the next item
        self._in_order: Sequence[Member] = ()

    def begin(self) -> None:
        """Note the updates made so far, since a window may be open from an earlier loop."""
        for member in self._members:
            self._updates[id(member)] = [other.updates for other in self._others(member)]

    def _others(self, member: Member) -> list[Member]:
        return [other for other in self._members if other is not member]

    # ---------------------------------------------------------- updated models

    def refuse_moved(self, member: Member, used: Callable[[], set[int]]) -> None:
        """Refuse a loss that uses a model which another member has updated in this window.

        `used()` returns the ids of the parameters that the loss is computed with.
        """
        others = self._others(member)
        now = [other.updates for other in others]
        if not member._progress.items:
            self._updates[id(member)] = now
        for other, before, after in zip(others, self._updates[id(member)], now, strict=True):
            if before == after:
                continue
            for model in other._ledger.target.models:
                if not used().isdisjoint(map(id, model.parameters())):
                    _raise_moved(model, member, other)

    def guard(self, updated: Member) -> None:
        """Refuse to call the models of a member after its update, while other windows use them."""
        waiting = [
            other
            for other in self._others(updated)
            if other._progress.items and other._progress.is_item_open
        ]

        def refuse(model: nn.Module, _: Any) -> None:
            for member in waiting:
                if model.training and member._progress.is_item_open:
                    _raise_moved(model, member, updated)

        for model in updated._ledger.target.models if waiting else ():
            self._guards.append(model.register_forward_pre_hook(refuse))

    def unguard(self) -> None:
        """Allow to call all models again: the next item begins."""
        while self._guards:
            self._guards.pop().remove()

    # ---------------------------------------------------------- several ranks

    def keep_order(self, members: Sequence[Member]) -> None:
        """Demand that the windows of these members close in this order."""
        self._in_order = members

    def refuse_other_order(self, closing: Member) -> None:
        """Refuse to close before a member that `over` was given before this one."""
        for member in self._in_order:
            if member is closing:
                return
            if member._progress.is_item_open:
                raise WindowError(
                    "wb.over on several ranks: the last backwards of a window must come in the "
                    "order in which the accumulators were given, since a rank without data closes "
                    "its windows in that order: give them to wb.over in the order of their "
                    "backwards"
                )

    def refuse_out_of_step(self, members: Sequence[Member]) -> None:
        """Refuse members whose windows do not begin and end together."""
        progress = [member._progress for member in members]
        if len({(position.size, position.items) for position in progress}) > 1:
            steps = " and ".join(str(position.size) for position in progress)
            raise WindowError(
                f"wb.over on several ranks, with accumulators of {steps} steps, or with a flush() "
                "or discard() of one of them: the ranks meet before each window, so all windows of "
                "a loop must begin and end together; give them the same steps, or a loop for each"
            )


def _raise_moved(model: nn.Module, member: Member, updated: Member) -> NoReturn:
    ours, theirs = member._progress, updated._progress
    when = (
        f"{type(model).__name__} was updated when {ours.items} of {ours.size} micro-batches of "
        "another model's window were done"
    )
    if theirs.size != ours.size:
        raise WindowError(
            f"{when}: accumulators in one wb.over need the same steps, and these have "
            f"{theirs.size} and {ours.size}. To update a critic more often than its generator "
            "(n_critic), give the critic a loop of its own"
        )
    raise WindowError(
        f"{when}, and the next micro-batch uses it: that window would mix the old and the new "
        "weights. Compute all losses of a micro-batch before its first backward(), and call "
        "backward() on a loss before the backwards that update its models. With run(), give each "
        "accumulator its own loop"
    )


def parameters_below(loss: Tensor | Loss | Terms | None) -> set[int]:
    """Return the ids of the parameters that the graph of a loss leads to."""
    terms = terms_of(loss).values() if isinstance(loss, Loss | Terms) else ()
    return {
        id(getattr(node, "variable", None))
        for node in graph_nodes([term.total for term in terms] or [loss])
    }
