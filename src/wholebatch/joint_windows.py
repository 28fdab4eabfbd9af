"""Several accumulators in one loop, such as the two of a GAN: what they must not do to each other.

The window of one may end, and its model be updated, while the window of another is open. A loss of
the open window that used the model before and uses it again would mix old and new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol
from weakref import ref

from torch import Tensor, nn

from wholebatch.errors import WindowError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.autograd_graph import graph_nodes
from wholebatch.window.ledger import Ledger


class Member(Protocol):
    """An accumulator of a loop."""

    _may_use_item: bool

    @property
    def updates(self) -> int:
        """Updates that it has made."""

    @property
    def _ledger(self) -> Ledger: ...

    @property
    def _window_size(self) -> int: ...


def _items(member: Member) -> int:
    return len(member._ledger.micro_batches)


class JointWindows:
    """The windows of the members of one loop."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._refs = [ref(member) for member in members]  # a loop that was left holds none
        self.are_several = len(members) > 1
        self._updates: dict[int, list[int]] = {}  # of the others, when a member's window began
        self._guards: list[Any] = []  # hooks on updated models, until the next item
        self._keeps_order = False

    @property
    def _members(self) -> list[Member]:
        return [member for member in (held() for held in self._refs) if member is not None]

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
        if not _items(member):
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
            ref(other) for other in self._others(updated) if _items(other) and other._may_use_item
        ]

        closed = ref(updated)

        def refuse(model: nn.Module, _: Any) -> None:
            for held in waiting:
                member = held()
                if model.training and member is not None and member._may_use_item:
                    _raise_moved(model, member, closed())

        for model in updated._ledger.target.models if waiting else ():
            self._guards.append(model.register_forward_pre_hook(refuse))

    def unguard(self) -> None:
        """Allow to call all models again: the next item begins."""
        while self._guards:
            self._guards.pop().remove()

    # ---------------------------------------------------------- several ranks

    def keep_order(self) -> None:
        """Demand that the windows of several ranks close in the order of the members."""
        self._keeps_order = True

    def refuse_other_order(self, closing: Member) -> None:
        """Refuse to close before a member that `over` was given before this one."""
        for member in self._members if self._keeps_order else ():
            if member is closing:
                return
            if member._ledger.sync.ranks > 1 and member._may_use_item:
                raise WindowError(
                    "wb.over on several ranks: the last backwards of a window must come in the "
                    "order in which the accumulators were given, since a rank without data closes "
                    "its windows in that order: give them to wb.over in the order of their "
                    "backwards"
                )

    def refuse_out_of_step(self, members: Sequence[Member]) -> None:
        """Refuse members whose windows do not begin and end together."""
        if len({(member._window_size, _items(member)) for member in members}) > 1:
            steps = " and ".join(str(member._window_size) for member in members)
            raise WindowError(
                f"wb.over on several ranks, with accumulators of {steps} steps, or with a flush() "
                "or discard() of one of them: the ranks meet before each window, so all windows of "
                "a loop must begin and end together; give them the same steps, or a loop for each"
            )


def _raise_moved(model: nn.Module, member: Member, updated: Member | None) -> NoReturn:
    ours = member._window_size
    theirs = ours if updated is None else updated._window_size
    when = (
        f"{type(model).__name__} was updated when {_items(member)} of {ours} micro-batches of "
        "another model's window were done"
    )
    if theirs != ours:
        raise WindowError(
            f"{when}: accumulators in one wb.over need the same steps, and these have "
            f"{theirs} and {ours}. To update a critic more often than its generator "
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
