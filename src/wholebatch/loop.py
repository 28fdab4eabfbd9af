"""The loop over a loader: its items, the windows that they belong to, and those of other ranks.

`Accumulator.over`, `wb.over` and `WholeBatch.over` are each a `Loop`. It yields one item after the
other. Each member (an accumulator, or a WholeBatch) has a `Progress`: where it is in its window.
A window must know before a micro-batch's forward whether it is the last one, so in the middle of a
window the loop reads one item ahead. At the end of a window it does not: a loop that stops there
loses no item.

Ranks meet before each window. A rank that has run out of items takes part in the windows of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol
from weakref import WeakSet

from wholebatch.batch.lookahead_loader import NOTHING, Feed
from wholebatch.batch.samples import Static
from wholebatch.errors import OptionError, RankError, StateError, WindowError
from wholebatch.joint_windows import JointWindows, Member
from wholebatch.window.forward_state import ForwardState, restore_random
from wholebatch.window.ledger import Ledger


class State(Enum):
    """Where a member is in its window."""

    BETWEEN = "between windows"
    IN_ITEM = "in an item, whose backward is to come"
    MORE = "in an item, with another backward to come"
    DONE = "in a window, with all items so far done"
    WINDOW_GONE = "in an item whose window was closed or discarded"


_ITEM_IS_OPEN = (State.IN_ITEM, State.MORE, State.WINDOW_GONE)


class Progress:
    """Where an accumulator or a WholeBatch is in its window, and in the loop that drives it.

    `ask_size()` returns the number of items of the next window; it is called once per window.

    >>> progress = Progress(lambda: 2)
    >>> progress.begin_item()
    True
    >>> progress.is_last, progress.end_item(), progress.state.value
    (False, False, 'in a window, with all items so far done')
    >>> progress.begin_item()
    False
    >>> progress.is_last, progress.end_item()
    (True, True)
    """

    def __init__(self, ask_size: Callable[[], int]) -> None:
        self._ask_size = ask_size
        self._size: int | None = None
        self.state = State.BETWEEN
        self.items = 0
        """Items of the window that are done, also those without a backward."""
        self.is_last = False
        """True if the item is the last of its window."""
        self.counts = True
        """False if the item only takes part in the collectives of the other ranks."""
        self.loop: Loop | None = None
        """The loop that drives it now."""
        self._latest: Loop | None = None  # also when it has ended
        self._saved: dict[str, Any] | None = None  # a state that the next loop resumes from

    @property
    def size(self) -> int:
        """The number of items of the window, or of the next one."""
        if self._size is None:
            self._size = self._ask_size()
        return self._size

    def forget_size(self) -> None:
        """Ask again how large the next window is: its schedule or the epoch has changed."""
        in_first_item = self.loop is not None and self.state in (State.IN_ITEM, State.MORE)
        if not self.items and not in_first_item:
            self._size = None

    @property
    def is_between(self) -> bool:
        """True if no window has begun."""
        return self.state is State.BETWEEN

    @property
    def is_whole(self) -> bool:
        """True if the item is all of its window; outside of a window, if the next will be one."""
        if self.state is State.BETWEEN or self.state is State.WINDOW_GONE:
            return self.size == 1
        return self.is_last and self.items == (1 if self.state is State.DONE else 0)

    @property
    def is_item_open(self) -> bool:
        """True in an item whose last backward was not made."""
        return self.state in _ITEM_IS_OPEN

    def begin_item(self, *, last: bool | None = None, counts: bool = True) -> bool:
        """Begin an item; return True if it begins a window.

        `last` says whether it is the last of its window; None leaves it to the window's size.
        """
        # A first item whose backward was refused has left nothing: its window begins again.
        begins = not self.items and self.state is not State.MORE
        if last is False:
            self._size = max(self.size, self.items + 2)
        self.is_last = self.items + 1 >= self.size if last is None else last
        self.counts = counts
        self.state = State.IN_ITEM
        return begins

    def expect_more(self) -> None:
        """Note that another backward of the item follows."""
        self.state = State.MORE

    def end_item(self) -> bool:
        """Note that the item is done; return True if its window is complete."""
        self.state = State.DONE
        self.items += 1
        return self.is_last

    def end_window(self) -> None:
        """Note that the window was closed or discarded; an item that is open outlives it."""
        outlives = self.is_item_open and self.loop is not None
        self.state = State.WINDOW_GONE if outlives else State.BETWEEN
        self.items, self._size = 0, None

    def leave_item(self) -> None:
        """Leave an item that the loop has gone on from, or that its window does not hold."""
        if self.state is State.WINDOW_GONE or not self.items:
            self.state = State.BETWEEN
        elif self.is_item_open:
            self.state = State.DONE

    # ------------------------------------------------------------ the position

    def state_dict(self, ledger: Ledger) -> dict[str, Any] | None:
        """Return the position in the loader; None if no loop has stopped in the middle of one."""
        if self.loop is not None and self.is_item_open and ledger.open is None:
            raise StateError(
                "state_dict() inside over() before this item was used (by backward(), run() or "
                "step()): it would be lost. Save after a Step"
            )
        feed = None if self._latest is None else self._latest.feed
        return None if feed is None or feed.is_exhausted else feed.state_dict()

    def refuse_load(self) -> None:
        """Refuse to load a state inside a loop, which would go on at another place."""
        if self.loop is not None:
            raise WindowError("load_state_dict() inside over(): leave the loop first")

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume the next loop where the saved one stopped."""
        self.end_window()
        self._latest, self._saved = None, saved

    @property
    def resumes(self) -> bool:
        """True if the next loop resumes from a saved state."""
        return self._saved is not None

    def attach(self, loop: Loop) -> None:
        """Note that a loop begins."""
        self.loop = self._latest = loop
        self._saved = None

    def open_feed(self, loader: Iterable[Any], static: Static) -> Feed:
        """Return the items of a loader, from where the saved or the latest loop has stopped."""
        if self._saved is not None:
            restore_random(self._saved["random"])  # whatever was drawn since it was loaded
            return Feed(loader, self._saved["feed"], static=static)
        before = None if self._latest is None else self._latest.feed
        # An iterator goes on where the last loop left it; the item looked ahead at is still there.
        if before is not None and before.loader is loader and isinstance(loader, Iterator):
            return before
        return Feed(loader, static=static)


class Driven(Member, Protocol):
    """An accumulator or a WholeBatch, as a loop drives it."""

    @property
    def _progress(self) -> Progress: ...

    @property
    def _runs_forwards(self) -> bool:
        """True if it runs the forwards of an item itself, and meets the other ranks to do so."""

    def _begin_window(self) -> None:
        """Begin a window, before its first item."""

    def _end_unused(self) -> None:
        """End a window whose last item made no backward."""

    def _join(self, like: Any, most: int) -> None:
        """Take part in a window of the other ranks, without an item.

        `like` is the last item, and `most` how many a rank brings.
        """

    def _meet(self, items: int) -> tuple[int, int]:
        """Meet the other ranks before a window; return the most and fewest items of a rank."""

    def _end_epoch(self) -> None:
        """Note that the loader has ended."""


_NESTED = (
    "over() inside over() on the same model: both would add to its gradients; use one loop, or "
    "wb.over(loader, first, second) for several accumulators"
)
_running: WeakSet[Loop] = WeakSet()


class Loop:
    """One pass over a loader, with one member or several whose windows it drives.

    Args:
        loader: Any iterable of items.
        members: Those that use the items.
        static: Leaves of an item that have no samples.
        continue_window: Continue windows that an earlier loop left open, instead of refusing them.
        ahead: Read the next item while the device computes the update.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        members: Sequence[Driven],
        *,
        static: Static = (),
        continue_window: bool = False,
        ahead: bool = False,
    ) -> None:
        if not members:
            raise OptionError("wb.over(loader): give at least one Accumulator")
        self.members = members
        self.joint = JointWindows(members)
        self.feed: Feed | None = None
        self.reads_ahead = ahead
        self._loader, self._static = loader, static
        self._latest_item: Any = NOTHING
        self._before: ForwardState | None = None  # of the models, before a forward without weight
        self._refuse_nested()
        if not continue_window:
            self._refuse_open_windows()
        self._refuse_shared_models()

    def items(self) -> Iterator[Any]:
        """Yield the items, to the loader's end on every rank."""
        self._refuse_nested()  # another loop may have started meanwhile, as in zip()
        resuming = [member._progress for member in self.members if member._progress.resumes]
        source = (resuming or [self.members[0]._progress])[0]
        self.feed = source.open_feed(self._loader, self._static)
        _running.add(self)
        for member in self.members:
            member._progress.attach(self)
        self.joint.begin()
        try:
            if any(member._ledger.sync.ranks > 1 for member in self.members):
                yield from self._windows_of_ranks()
            else:
                yield from self._items_of_window(None)
            for member in self.members:
                member._end_epoch()
        finally:
            self._stop()

    def read_ahead(self) -> object:
        """Read the next item, if the loop reads ahead."""
        return self.reads_ahead and self.feed is not None and self.feed.has_next()

    # -------------------------------------------------------------- beginning

    def _refuse_nested(self) -> None:
        """Refuse a loop over models that another loop is in the middle of.

        A loop that was left between two windows, by `next()` instead of `for`, is over.
        """
        models = self._models()
        for other in list(_running):
            if models.isdisjoint(other._models()) or other._may_be_left():
                continue
            raise WindowError(_NESTED)

    def _refuse_open_windows(self) -> None:
        """Refuse windows from an earlier loop, unless a state is loaded that drops them."""
        for member in self.members:
            progress = member._progress
            if progress.resumes:
                continue
            if member._ledger.added.owners:
                raise WindowError(
                    f"a window is still open with {progress.items} of {progress.size} "
                    "micro-batches from an earlier loop: flush() to close it, discard() to drop "
                    "it, or over(loader, continue_window=True) to go on with it"
                )
            if progress.items:  # bodies that made no backward
                progress.end_window()

    def _refuse_shared_models(self) -> None:
        """Refuse two members of one model: both would add to its gradients."""
        models = [model for member in self.members for model in member._ledger.target.models]
        if len(set(map(id, models))) != len(models):
            raise OptionError(
                "two accumulators over the same model in one wb.over: give one Accumulator a list "
                "of optimizers instead"
            )

    def _models(self) -> set[Any]:
        """Return the models whose windows may be open between two items."""
        return {
            model
            for member in self.members
            if not member._runs_forwards
            for model in member._ledger.target.models
        }

    def _may_be_left(self) -> bool:
        """End a loop that is between two windows; return False if it is not."""
        [member, *others] = self.members
        if others or member._ledger.sync.ranks > 1 or not member._progress.is_between:
            return False
        assert self.feed is not None
        if not self.feed.has_next():
            member._end_epoch()
        self._stop()
        return True

    def _stop(self) -> None:
        """Let go of the members, whether the loader has ended or the loop was left."""
        if _running is None:  # the interpreter ends, and the globals are gone
            return
        _running.discard(self)
        self.joint.unguard()
        self.put_back()
        for member in self.members:
            progress = member._progress
            if progress.loop is not self:
                continue  # another loop has begun
            if progress.state is State.MORE:
                member._ledger.end_micro_batch()
                progress.end_item()
            progress.leave_item()
            progress.loop, progress.counts = None, True
            member._ledger.sync.restore()

    # ------------------------------------------------------------------ items

    def begin_item(self, member: Driven, *, last: bool | None = None, counts: bool = True) -> None:
        """Begin the item for a member, and with its first item a window."""
        assert self.feed is not None
        progress = member._progress
        begins = progress.begin_item(last=last, counts=counts)
        if last is None and not progress.is_last:
            progress.is_last = not self.feed.has_next()
        if begins:
            member._begin_window()

    def _leave_item(self, member: Driven) -> None:
        """End the body of the loop. A body without a backward counts as an item too."""
        progress = member._progress
        if progress.loop is not self:
            raise WindowError(_NESTED)
        if progress.state is State.DONE or progress.state is State.BETWEEN:
            return
        if progress.state is State.MORE:
            member._ledger.end_micro_batch()
        if progress.state is State.WINDOW_GONE:
            progress.leave_item()
        elif progress.end_item():
            member._end_unused()

    def _items_of_window(self, lead: Driven | None) -> Iterator[Any]:
        """Yield items to the end of the lead's window; with None, to the loader's end."""
        assert self.feed is not None
        while self.feed.take():
            for member in self.members:
                self.begin_item(member)
            yield from self._body(self.feed.current)
            if lead is not None and lead._progress.is_between:
                return

    def _body(self, item: Any) -> Iterator[Any]:
        """Yield an item to the body of the loop, and end it for all members."""
        self.joint.unguard()
        self._latest_item = item
        yield item
        for member in self.members:
            self._leave_item(member)

    # ---------------------------------------------------------- several ranks

    def _windows_of_ranks(self) -> Iterator[Any]:
        """Yield items until no rank has any; all ranks meet before each window.

        Where forwards run collectives, every rank runs as many as the one with the most items: its
        last item again, with weight zero and the model's state put back.
        """
        assert self.feed is not None
        shared = [member for member in self.members if member._ledger.sync.ranks > 1]
        lead = shared[0]
        equal = any(
            member._ledger.sync.counts_must_agree and not member._runs_forwards for member in shared
        )
        if equal and len(self.members) > 1:
            raise OptionError(
                "wb.over with several accumulators on a sharded model: every rank would have to "
                "run the forwards in the same order. Give one Accumulator a list of optimizers "
                "(for DeepSpeed engines: one loop each)"
            )
        self.joint.keep_order(shared)
        is_first = True
        while True:
            self.joint.refuse_out_of_step(shared)
            wanted = lead._progress.size - lead._progress.items if equal else 1
            own = self.feed.look_ahead(wanted)
            most, fewest = lead._meet(own)
            if most == 0:
                self.feed.take()  # it takes note of its end
                return
            if is_first and fewest == 0 and (equal or len(shared) > 1):
                why = "a sharded model needs every rank in every forward"
                raise RankError(
                    "a rank has no micro-batch for the first window, and "
                    f"{why if equal else 'several accumulators in one loop need it on every rank'}"
                    ": give every rank at least one"
                )
            is_first = False
            for member in shared:
                if not member._runs_forwards:
                    member._ledger.sync.before_forwards()
            if equal:
                yield from self._equally_many(lead, own, most)
            elif own:
                yield from self._items_of_window(lead)
            else:
                for member in shared:
                    member._join(self._latest_item, most)

    def _equally_many(self, lead: Driven, own: int, most: int) -> Iterator[Any]:
        """Yield as many items as the rank with the most, the last of them without weight."""
        assert self.feed is not None
        for index in range(most):
            counts = index < own
            item = self.feed.current if self.feed.take() else self._latest_item
            if not counts:
                self._before = ForwardState(*lead._ledger.target.models)
            self.begin_item(lead, last=index == most - 1, counts=counts)
            yield from self._body(item)
            self.put_back()

    def before_close(self, member: Driven) -> None:
        """Prepare to close the window of a member."""
        self.put_back()
        self.joint.refuse_other_order(member)
        self.joint.guard(member)

    def put_back(self) -> None:
        """Put back what a forward without weight has changed in the models."""
        if self._before is not None:
            self._before.restore()
        self._before = None
