"""The loop over a loader: its items, the windows that they belong to, and those of other ranks.

`Accumulator.over`, `wb.over` and `WholeBatch.over` are each a `Loop`. It yields one item after the
other and reads none before its turn: a full window closes by count, in its last backward, and the
tail when the loader has ended. Two kinds of window must know their last item before: those of
engines that reduce in the last backward (`distributed/read_ahead.py`), and those that leave the
gradient to the loop's body, which reads one item ahead.

Ranks meet before each window. A rank that has run out of items takes part in the windows of the
others.

A loop holds its members weakly, and a member keeps of a loop that was left only its position.

The windows of several members (the two of a GAN) begin and end in the same items. After the update
of one, its models may not be called for the windows of the others, which would mix old and new
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar
from weakref import ref

from torch import nn

from wholebatch.batch.lookahead_loader import NOTHING, Feed
from wholebatch.batch.samples import Static
from wholebatch.distributed.read_ahead import Ahead, read_ahead
from wholebatch.errors import OptionError, RankError, StateError, WindowError
from wholebatch.window.forward_state import ForwardState, restore_random
from wholebatch.window.ledger import HasLedger

_NESTED = (
    "this loop is over: another over() of the same object has begun inside of it or in turn with "
    "it, or a state was loaded in it. Both would add to its gradients: use one loop at a time, or "
    "wb.over(loader, first, second) for several accumulators"
)
_MOVED = (
    "{} was updated when the last micro-batch of another model's window was not done, and this "
    "micro-batch uses it: that window would mix the old and the new weights. Compute all losses of "
    "a micro-batch before its first backward(). With run(), give each accumulator its own loop"
)


class Member(HasLedger):
    """What a loop drives: an accumulator or a WholeBatch."""

    _runs_forwards: ClassVar[bool] = False
    """True if it runs the forwards of an item itself, and meets the other ranks to do so."""
    _loop: Loop | None = None
    """The loop that drives it now."""
    _may_use_item: bool = False
    """True in an item of the loop that was not used yet."""
    _is_last_item: bool | None = None
    """True if the item is the last of its window; None if only the window's size tells."""
    _position: dict[str, Any] | None = None
    """Where the latest loop was left in its loader."""
    _resumes: dict[str, Any] | None = None
    """A loaded state, from which the next loop goes on."""
    _read_ahead: Feed | None = None
    """A loader whose next items a loop has read and not used."""

    @property
    def _window_size(self) -> int:
        """The number of items of the window, or of the next one."""
        return 1

    @property
    def _leaves_gradients(self) -> bool:
        """True if the body of the loop steps with the gradient of a window."""
        return not (self._runs_forwards or self._ledger.target.steps)

    def _before_window(self) -> None:
        """Prepare a window before its first forward."""

    def _set_size(self, size: int) -> None:
        """Set the number of items of the window that begins."""

    def _end_item(self) -> None:
        """End an item of the loop that was not used, or not to its end."""

    def _end_tail(self) -> None:
        """Close the window that the end of the loader has left open."""

    def _join(self, like: Any, most: int) -> None:
        """Take part in a window of the other ranks, without an item.

        `like` is the last item, and `most` how many a rank brings.
        """

    def _meet(self, items: int) -> tuple[int, int]:
        """Meet the other ranks before a window; return the most and fewest items of a rank."""
        return self._ledger.sync.group.most_and_fewest(items)

    def _end_epoch(self) -> None:
        """Note that the loader has ended."""

    # ------------------------------------------------------------ the position

    def _loop_state(self) -> dict[str, Any] | None:
        """Return the position in the loader; None if no loop has stopped in the middle of one."""
        if self._loop is None:
            return self._position if self._read_ahead is None else self._read_ahead.state_dict()
        if self._may_use_item and self._ledger.open is None:
            raise StateError(
                "state_dict() inside over() before this item was used (by backward(), run() or "
                "step()): it would be lost. Save after a Step"
            )
        return self._loop.position()

    def _load_loop_state(self, saved: dict[str, Any]) -> None:
        """Resume the next loop where the saved one stopped; a loop that was left is over."""
        self._position, self._resumes, self._read_ahead = None, saved, None
        self._loop, self._may_use_item = None, False


class Loop:
    """One pass over a loader, with one member or several whose windows it drives.

    Args:
        loader: Any iterable of items.
        members: Those that use the items.
        static: Leaves of an item that have no samples.
        continue_window: Continue windows that an earlier loop left open, instead of refusing them.
        ahead: Read the next item while the device computes the update.
        size: The number of items, if they are one window and no epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        members: Sequence[Member],
        *,
        static: Static = (),
        continue_window: bool = False,
        ahead: bool = False,
        size: int | None = None,
    ) -> None:
        if not members:
            raise OptionError("wb.over(loader): give at least one Accumulator")
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise OptionError(f"over({loader!r}): must be a loader, or a list of (micro-)batches")
        models = [model for member in members for model in member._ledger.target.models]
        if len(set(map(id, models))) != len(models):
            raise OptionError(
                "two accumulators over the same model in one wb.over: give one Accumulator a list "
                "of optimizers instead"
            )
        self._members = [ref(member) for member in members]
        self.has_several = len(members) > 1
        self._guards: list[Any] = []  # hooks on updated models, until the next item
        self.reads_ahead = ahead
        self.counts = True
        """False if the item only takes part in the collectives of the other ranks."""
        self._loader, self._static, self._size = loader, static, size
        self._feed: Feed | None = None
        self._latest: Any = NOTHING  # item, for ranks that have none any more
        self._before: ForwardState | None = None  # of the models, before a forward without weight
        for member in members if not continue_window else ():
            _refuse_open_window(member)

    @property
    def members(self) -> list[Member]:
        """Those that are still there."""
        return [member for member in (held() for held in self._members) if member is not None]

    @property
    def _lead(self) -> Member:
        """The first member that has other ranks, or the first."""
        members = self.members
        if not members:
            raise WindowError("the object of this over() was deleted: keep it in a variable")
        return next((member for member in members if member._ledger.sync.ranks > 1), members[0])

    def items(self) -> Iterator[Any]:
        """Yield the items, to the loader's end on every rank."""
        # No name here, and in the methods that yield, may hold a member: a loop that was left
        # would keep it alive.
        self._begin()
        try:
            if self._windows_are_read():
                yield from self._windows_ahead()
            elif self._lead._ledger.sync.ranks > 1:
                yield from self._windows_of_ranks()
            else:
                while self._take():
                    yield self._begin_item()
                    self._end_item()
                self._end_tail()
            self._end_epoch()
        finally:
            self._stop()

    def position(self) -> dict[str, Any] | None:
        """Return the position after the items that were taken; None at the loader's end."""
        feed = self._feed
        return None if feed is None or feed.has_ended else feed.state_dict()

    def read_next(self) -> object:
        """Read the next item, if the loop reads ahead."""
        return self.reads_ahead and self._feed is not None and self._feed.has_next()

    # -------------------------------------------------------------- begin and stop

    def _begin(self) -> None:
        members = self.members
        source = next((member for member in members if member._resumes), self._lead)
        if self._size is not None:
            source._set_size(self._size)
            self._feed = Feed(self._loader)
        elif source._resumes is not None:
            restore_random(source._resumes["random"])  # whatever was drawn since it was loaded
            self._feed = Feed(self._loader, source._resumes["feed"], static=self._static)
        else:
            left = source._read_ahead  # an iterator goes on where the last loop has left it
            goes_on = left and left.loader is self._loader and isinstance(self._loader, Iterator)
            self._feed = left if goes_on else Feed(self._loader, static=self._static)
        for member in members:  # another loop of theirs, that was left, is over
            member._loop = self
            if self._size is None:
                member._position = member._read_ahead = member._resumes = None

    def _stop(self) -> None:
        """Let go of the members, whether the loader has ended or the loop was left."""
        if ForwardState is None:  # the interpreter ends, and the globals are gone
            return
        self._unguard()
        self.put_back()
        feed, self._feed = self._feed, None
        for member in self.members:
            if member._loop is not self:
                continue  # another loop has begun
            if member._ledger.micro is not None and member._ledger.micro.parts:
                member._ledger.end_micro_batch()
            member._ledger.micro = None  # the item was not used
            member._loop, member._may_use_item = None, False
            member._ledger.sync.restore()
            if feed is None or self._size is not None:
                continue
            if feed.has_ended:
                member._position = feed.state_at_end()
            elif feed.holds_items:
                member._read_ahead = feed
            else:
                member._position = feed.state_dict()

    def _end_epoch(self) -> None:
        for member in self.members if self._size is None else ():
            member._end_epoch()

    # ------------------------------------------------------------------ items

    def _take(self) -> bool:
        """Read the next item; return False at the loader's end."""
        assert self._feed is not None
        return self._feed.take()

    def _begin_item(self, ahead: Ahead | None = None) -> Any:
        """Begin an item for all members, and return it."""
        assert self._feed is not None
        self._unguard()
        if self.has_several:
            self._refuse_out_of_step()
        self.counts = ahead is None or ahead.counts
        for member in self.members:
            if member._loop is not self:
                raise WindowError(_NESTED)
            member._may_use_item = True
            if not member._ledger.micro_batches:
                member._before_window()
            member._is_last_item = None if ahead is None else ahead.last
            if ahead is None and member._leaves_gradients:
                is_full = len(member._ledger.micro_batches) + 1 >= member._window_size
                member._is_last_item = is_full or not self._feed.has_next()
        return self._feed.current if ahead is None else ahead.item

    def _end_item(self) -> None:
        """End the body of the loop. A body without a backward counts as an item too."""
        for member in self.members:
            if member._loop is not self:
                raise WindowError(_NESTED)
            if member._may_use_item:
                member._end_item()
                member._may_use_item = False
        self.put_back()

    def _end_tail(self) -> None:
        """Close the windows that the loader's end has left open."""
        for member in self.members:
            member._end_tail()

    # ---------------------------------------------------------- several ranks

    def _windows_of_ranks(self) -> Iterator[Any]:
        """Yield items until no rank has any; all ranks meet before each window."""
        assert self._feed is not None
        is_first = True
        while True:
            has_item = self._take()
            most = self._meet(has_item, is_first=is_first)
            is_first = False
            if most == 0:
                return
            if not has_item:
                self._join(most)
                continue
            while True:
                self._latest = self._begin_item()
                yield self._latest
                self._end_item()
                if not self._lead._ledger.micro_batches:  # its window is over
                    break
                if not self._take():
                    self._end_tail()
                    break

    def _join(self, most: int) -> None:
        """Take part in the windows of the other ranks, without an item."""
        for member in self.members:
            if member._ledger.sync.ranks > 1:
                member._join(self._latest, most)

    def _meet(self, has_item: bool, *, is_first: bool) -> int:
        """Meet the other ranks before a window; return how many items a rank brings at most."""
        shared = [member for member in self.members if member._ledger.sync.ranks > 1]
        self._refuse_out_of_step()
        most, fewest = self._lead._meet(int(has_item))
        if is_first and most and fewest == 0 and len(shared) > 1:
            raise RankError(
                "a rank has no micro-batch for the first window, and several accumulators in one "
                "loop need it on every rank: give every rank at least one"
            )
        for member in shared if most else ():
            if not member._runs_forwards:
                member._ledger.sync.before_forwards()
        return most

    def _windows_are_read(self) -> bool:
        """True if a window's items are read before its first forward."""
        ahead = [m for m in self.members if m._ledger.sync.reads_ahead and not m._runs_forwards]
        if ahead and len(self._members) > 1:
            raise OptionError(
                "wb.over with several accumulators on a sharded model: every rank would have to "
                "run the forwards in the same order. Give one Accumulator a list of optimizers "
                "(for DeepSpeed engines: one loop each)"
            )
        return bool(ahead)

    def _windows_ahead(self) -> Iterator[Any]:
        """Yield as many items as the rank with the most, the last of them without weight."""
        assert self._feed is not None
        group = self._lead._ledger.sync.group
        for window in read_ahead(self._feed.read(), self._items_to_come, group):
            self._lead._ledger.sync.before_forwards()
            for ahead in window:
                if ahead.counts:
                    self._feed.give_out()
                else:
                    self._before = ForwardState(*self._lead._ledger.target.models)
                yield self._begin_item(ahead)
                self._end_item()

    def _items_to_come(self) -> int:
        return self._lead._window_size - len(self._lead._ledger.micro_batches)

    def before_close(self, member: Member) -> None:
        """Prepare to close the window of a member."""
        self.put_back()
        for first in self.members if member._ledger.sync.ranks > 1 else ():
            if first is member:
                break
            if first._may_use_item:
                raise WindowError(
                    "wb.over on several ranks: the last backwards of a window must come in the "
                    "order in which the accumulators were given, since a rank without data closes "
                    "its windows in that order: give them to wb.over in the order of their "
                    "backwards"
                )

        waiting = [
            ref(other)
            for other in (self.members if self.has_several else ())
            if other is not member and other._may_use_item and other._ledger.micro_batches
        ]

        def refuse(model: nn.Module, _: Any) -> None:
            others = [held() for held in waiting]
            if model.training and any(other and other._may_use_item for other in others):
                raise WindowError(_MOVED.format(type(model).__name__))

        for model in member._ledger.target.models if waiting else ():
            self._guards.append(model.register_forward_pre_hook(refuse))

    def _unguard(self) -> None:
        """Allow to call all models again: the next item begins."""
        while self._guards:
            self._guards.pop().remove()

    def _refuse_out_of_step(self) -> None:
        """Refuse members whose windows do not begin and end in the same items."""
        windows = [(m._window_size, len(m._ledger.micro_batches)) for m in self.members]
        if len(set(windows)) > 1:
            steps = " and ".join(str(size) for size, _ in windows)
            raise WindowError(
                f"wb.over with accumulators of {steps} steps, or with a flush() or discard() of "
                "one of them: all windows of a loop must begin and end together, since a window "
                "may use models that another one updates. Give them the same steps, or a loop for "
                "each (to update a critic more often than its generator, n_critic)"
            )

    def put_back(self) -> None:
        """Put back what a forward without weight has changed in the models."""
        if self._before is not None:
            self._before.restore()
        self._before = None


def _refuse_open_window(member: Member) -> None:
    """Refuse a window from an earlier loop, unless a state is loaded that drops it."""
    ledger = member._ledger
    if member._resumes is not None:
        return
    if ledger.has_losses:
        raise WindowError(
            f"a window is still open with {len(ledger.micro_batches)} of {member._window_size} "
            "micro-batches from an earlier loop: flush() to close it, discard() to drop it, or "
            "over(loader, continue_window=True) to go on with it"
        )
    ledger.micro_batches.clear()  # bodies that made no backward
    ledger.micro = None
