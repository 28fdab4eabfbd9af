"""The alarm between ranks: if one fails or hangs, all end, and none waits in a collective for ever.

The failing rank posts its message in the job's store. A thread in every rank reads the store once a
second. A rank that waits in one of our own collectives raises the message at once. A rank that is
stuck inside an engine's collective is ended with the message after a grace period.

A rank that hangs, or is stopped, posts nothing. So a rank that has made no progress for longer than
the deadline (see `Progress`) asks every rank for its position, and posts which rank hangs, and
where.

Every rank confirms in the store that it has read the message. Rank 0, whose process may hold the
store, ends only after all have confirmed. Otherwise they would find only that the store is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from wholebatch.errors import OptionError, RankError, WholebatchError

DEADLINE = "WHOLEBATCH_DEADLINE"
"""The environment variable of the deadline: seconds, "off", or "auto"."""
_TIMES_SLOWEST = 10.0
_SETTLED = 2  # windows after which the slowest says something


def parse_deadline(text: str, label: str = DEADLINE) -> float | None:
    """Return the seconds that a user wrote: None for "auto", infinity for "off".

    >>> parse_deadline("90"), parse_deadline("auto"), parse_deadline("off")
    (90.0, None, inf)
    """
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise OptionError(f'{label} {text}: must be seconds above 0, "auto" or "off"')
    return seconds


class Progress:
    """The marks that a rank makes on its way, and the deadline for the next one.

    The deadline runs while a rank is inside a window or waits in a collective. Between windows a
    rank may evaluate or save for as long as it likes; only the ranks that wait for it count the
    time.
    """

    def __init__(self, *, patience: float) -> None:
        self.fixed = parse_deadline(os.environ.get(DEADLINE) or "auto")
        self.least = patience  # of an automatic deadline
        self.patience = patience  # before there are windows to go by
        self.always = False  # True: between windows too
        self.count = 0
        self.windows = 0
        self.slowest = 0.0
        self.waits = 0  # in a collective of ours
        self.error: str | None = None  # that the last window ended with
        self.is_open = False
        self._handled: BaseException | None = None  # when the window was opened
        self._since: float | None = None

    def mark(self) -> None:
        """Note a step forward; the deadline for the next one begins."""
        now = time.monotonic()
        if self._since is not None:
            self.slowest = max(self.slowest, now - self._since)
        self.count += 1
        self._since = now

    def begin(self) -> None:
        """Note that a window opens."""
        self._handled = sys.exc_info()[1]
        self.is_open = True
        self.mark()

    def end(self) -> None:
        """Record that the window has ended, and the error that ended it, if any."""
        error = sys.exc_info()[1]
        if error is self._handled:  # the whole step is made in an except block
            error = None
        self.error = None if error is None else error_line(error)
        self.windows += self.is_open and error is None
        self.is_open = False
        self._handled = None
        self.mark()
        self.pause()

    def pause(self) -> None:
        """Stop counting, unless a window is open."""
        if self.is_open or self.always:
            self.mark()
        else:
            self._since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the begin and end of a collective; outside a window, stop counting afterwards."""
        inside = self._since is not None
        self.mark()
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            self.mark()
            if not inside and not self.always:
                self._since = None

    def begin_again(self) -> None:
        """Count from now: this process itself was stopped, so the others are not to blame."""
        if self._since is not None:
            self._since = time.monotonic()

    @property
    def idle(self) -> float:
        """The seconds since the last mark of an open window; 0 between windows."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def deadline(self) -> float:
        """The seconds that may pass between two marks."""
        if self.fixed is not None:
            return self.fixed
        if self.windows < _SETTLED:
            return max(self.patience, self.least)
        return max(self.least, _TIMES_SLOWEST * self.slowest)

    def position(self) -> dict[str, Any]:
        """Return how far this rank is and where, for the other ranks."""
        place, in_collective = place_of(threading.main_thread())
        return {
            "count": self.count,
            "waits": bool(self.waits) or in_collective,
            "place": place,
            "error": self.error,
        }


def error_line(error: BaseException) -> str:
    """Return an error as Python prints it last: its class and message."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def place_of(thread: threading.Thread) -> tuple[str, bool]:
    """Return the line at which a thread stands, and True if that is in torch's collectives.

    It is the innermost line of the user's own code, if there is one.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere: its main thread has ended", False
    stack = traceback.extract_stack(frame)
    homes = {
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        Path(sysconfig.get_path("stdlib")),
        Path(sysconfig.get_path("purelib")),
    }
    own = [
        one
        for one in stack
        if not one.filename.startswith("<") and homes.isdisjoint(Path(one.filename).parents)
    ]
    line, inner = own[-1] if own else stack[-1], stack[-1]
    place = f"{line.filename}:{line.lineno}, in {line.name}"
    if inner is not line:
        place += f" (inside {Path(inner.filename).name}:{inner.lineno}, in {inner.name})"
    return place, Path(torch.distributed.__file__).parent in Path(inner.filename).parents


_KEY = "wholebatch/failed"
_LEFT = "wholebatch/left"
_ASKED = "wholebatch/asked"
_POSITIONS = "wholebatch/positions"
_LOOK_EVERY = 1.0
_GRACE = 10.0
_ANSWER = 10.0  # seconds for a rank to answer with its position
_LAST_TURN = 0.1
_OWN_PATIENCE = 0.9  # of the process group's timeout: before torch gives up without a name


class Alarm:
    """Posts this rank's failure, and watches the others for errors and for silence."""

    def __init__(self, store: Any, rank: int, ranks: int, *, patience: float) -> None:
        self.progress = Progress(patience=patience)
        self.advice: str | None = None  # printed after the message, if it ends this rank
        self._store = store
        self._rank, self._ranks = rank, ranks
        self._message: str | None = None
        self._departure: str | None = None  # the message of a rank that ended by itself
        self._silent: list[int] = []  # the ranks that hang, if the message is about that
        self._readers: list[int] = []  # ranks that can read the message
        self._posted = False
        self._told = False
        self._no_cause = False
        self._answered = 0
        self._heard = time.monotonic()  # when the store last answered
        self._read_by_all = threading.Event()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"wholebatch-alarm-{target.__name__}", daemon=True)
            for target in (self._watch, self._guard)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._end)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook

    # --------------------------------------------------------------- telling

    def post(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first message stands."""
        if self._posted or isinstance(error, RankError):
            return
        if self._message is not None:  # this failure is only the consequence of another
            self._tell_before()
            return
        self._posted = True
        lost = is_of_a_collective(error)  # then the others may be dead
        readers = [self._rank] if lost else range(self._ranks)
        self._post(f"rank {self._rank}: {error_line(error)}", readers=readers)

    def _post(self, text: str, *, readers: Iterable[int], silent: Sequence[int] = ()) -> None:
        message = json.dumps({"text": text, "silent": [*silent], "readers": [*readers]})
        with contextlib.suppress(Exception):  # the store's own host is gone: they will notice
            self._store.compare_set(_KEY, "", message)

    def check(self) -> None:
        if self._message is not None and not self._posted:
            self._told = True
            raise RankError(self._words())

    def wait(self, work: Any) -> None:
        """Wait for an asynchronous collective on the host, but not for ranks that have failed."""
        pause = 2e-5
        while not work.is_completed():
            self.check()
            time.sleep(pause)
            pause = min(1e-3, pause * 1.3)
        with self.failures():
            work.wait()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Raise the message of the rank that failed in place of a collective's own error."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            cause = self._cause() if is_of_a_collective(error) else None
            if cause is None:
                self.progress.error = error_line(error)  # for the end of a script that caught it
                raise
            self._told = True
            raise RankError(cause) from error

    def _cause(self, *, wait: float = 5 * _LOOK_EVERY) -> str | None:
        """Return the reason why the others are gone; wait for one of them to post it."""
        until = time.monotonic() + (0.0 if self._no_cause else wait)
        while not self._posted:
            if self._message is not None:
                return self._words()
            with contextlib.suppress(Exception):  # the store's host is gone
                self._read_departure()
            if self._departure is not None:
                return f"another rank has left: {self._departure}"
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        self._no_cause = True  # do not wait twice
        return None

    def _words(self) -> str:
        if self._silent:
            return f"{self._message}. All ranks stop"
        return f"another rank failed, so this one stops: {self._message}"

    def _tell_before(self) -> None:
        if not self._told:
            self._told = True
            text = self._message or self._departure
            what = "" if self._silent else "another rank failed: "
            sys.stderr.write(f"wholebatch: before this, {what}{text}\n")

    # -------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Read messages and answer questions; this blocks while the store does not answer."""
        try:
            while not self._over.wait(_LOOK_EVERY) and not self._has_message():
                self._read_departure()
                self._answer()
                if self.progress.idle > self.progress.deadline:
                    self._ask()
                self._heard = time.monotonic()
            if self._message is not None and self._holds_store:
                self._wait_for_readers(_KEY, self._readers)
        except Exception:  # the process group is gone, and with it the store
            pass
        self._read_by_all.set()
        if self._posted or self._message is None or self._over.wait(_GRACE):
            return
        self._leave(self._words())

    def _guard(self) -> None:
        """End this rank if the store does not answer: its machine is stopped or gone."""
        before = time.monotonic()
        while not self._over.wait(_LOOK_EVERY):
            now = time.monotonic()
            if now - before > 5 * _LOOK_EVERY:  # stopped, with the whole job perhaps (Ctrl-Z)
                self.progress.begin_again()
            before = now
            progress = self.progress
            late = progress.idle - progress.deadline
            unheard = now - self._heard > _GRACE
            if late > _ANSWER + _GRACE and unheard and self._message is None:
                self._leave(
                    f"rank {self._rank} has made no progress for {progress.idle:.0f} s, and the "
                    "store of the job does not answer: the rank or machine that holds it (rank 0, "
                    "or torchrun) is stopped or gone"
                )

    def _has_message(self) -> bool:
        if self._message is None and self._store.check([_KEY]):
            found = json.loads(self._store.get(_KEY))
            self._silent, self._readers = found["silent"], found["readers"]
            self._message = found["text"]
            self._store.set(f"{_KEY}/read/{self._rank}", "")
        return self._message is not None

    def _read_departure(self) -> None:
        if self._departure is None and self._store.check([_LEFT]):
            self._departure = str(self._store.get(_LEFT).decode())
            self._store.set(f"{_LEFT}/read/{self._rank}", "")

    @property
    def _holds_store(self) -> bool:
        """True if the store lives in this process, and ends with it: rank 0 without torchrun."""
        return self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _wait_for_readers(self, key: str, readers: Iterable[int]) -> None:
        """Wait until these ranks have read what was posted, but no longer than the grace."""
        until = time.monotonic() + _GRACE
        marks = [f"{key}/read/{rank}" for rank in readers]
        while not self._store.check(marks) and time.monotonic() < until:
            time.sleep(0.02)

    def _leave(self, words: str) -> None:
        """End this process: its main thread is inside a collective, or does not come back."""
        sys.stderr.write(f"wholebatch: {words}\n")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if self._rank in self._silent and frame is not None:
            sys.stderr.write("where it stands (most recent call last):\n")
            sys.stderr.writelines(traceback.format_stack(frame))
        if self.advice is not None:
            sys.stderr.write(f"{self.advice}\n")
        sys.stderr.flush()
        os._exit(1)

    # --------------------------------------------------------------- silence

    def _answer(self) -> None:
        asked = int(self._store.add(_ASKED, 0))
        if asked > self._answered:
            self._answered = asked
            position = json.dumps({"asked": asked, **self.progress.position()})
            self._store.set(f"{_POSITIONS}/{self._rank}", position)

    def _ask(self) -> None:
        """Ask every rank for its position, and post which one holds the others up."""
        asked = int(self._store.add(_ASKED, 1))
        positions: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + _ANSWER
        while len(positions) < self._ranks and time.monotonic() < until:
            if self._over.wait(_LOOK_EVERY / 4) or self._has_message():
                return
            self._answer()
            for rank in set(range(self._ranks)) - positions.keys():
                key = f"{_POSITIONS}/{rank}"
                if self._store.check([key]):
                    found = json.loads(self._store.get(key))
                    if found["asked"] >= asked:
                        positions[rank] = found
            self._heard = time.monotonic()
        idle, deadline = self.progress.idle, self.progress.deadline
        if idle > deadline:  # still
            ranks, text = _blame(positions, self._ranks)
            since = f"for {idle:.0f} s (the deadline is {deadline:.0f} s; {DEADLINE} sets it)"
            self._post(text.format(since=since), silent=ranks, readers=positions)

    # ---------------------------------------------------------------- ending

    def _end(self) -> None:
        """At the end of the interpreter, print what was not told, and end the threads."""
        if not self._posted and not self._told:
            self._end_by_itself()
        self.leave_if_one_hangs()
        if self._message is not None or self._posted:
            self._read_by_all.wait(_GRACE)
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=5.0)
        # Gloo's threads release a collective's tensors after it is reported as done, and need the
        # interpreter for that. One that still waits for the interpreter when it ends aborts the
        # process ("terminate called without an active exception").
        time.sleep(_LAST_TURN)

    @property
    def one_hangs(self) -> bool:
        """True if all ranks end because one has fallen silent."""
        return bool(self._silent)

    def leave_if_one_hangs(self) -> None:
        """End this process at once if a rank is silent: gloo would wait for that rank.

        Call it when everything is printed.
        """
        if self._silent:
            self._read_by_all.wait(_GRACE)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _end_by_itself(self) -> None:
        """Post or print an error that the script caught and did not report."""
        error, is_open = self.progress.error, self.progress.is_open
        if error is None and not is_open:
            return
        if error is None and self._cause(wait=2 * _LOOK_EVERY) is not None:
            self._tell_before()
            return
        # Not as a failure: the others may have noticed it too, and be saving a checkpoint.
        left = f"rank {self._rank}: {error or 'its script ended in the middle of a window'}"
        with contextlib.suppress(Exception):
            self._store.compare_set(_LEFT, "", left)
            self._read_departure()
            if self._holds_store:
                self._wait_for_readers(_LEFT, range(self._ranks))

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, trace)
        if is_of_a_collective(error) and self._cause() is not None:
            self._tell_before()
            return
        self.post(error)
        if self._posted:
            time.sleep(3 * _LOOK_EVERY)  # the store may live in this process: let them read it


def _blame(positions: dict[int, dict[str, Any]], ranks: int) -> tuple[list[int], str]:
    """Return the ranks that hold the others up, and one line about their positions.

    A rank that does not answer is to blame. Else one that does not wait in a collective, the one
    that has come least far. If all of them wait, their collectives do not match.
    """
    absent = sorted(set(range(ranks)) - positions.keys())
    if absent:
        do = "does" if len(absent) == 1 else "do"
        return absent, (
            f"{named_ranks(absent)} made no progress {{since}} and {do} not answer: stopped, "
            "the machine is gone, or C code keeps the interpreter"
        )
    working = [rank for rank, position in positions.items() if not position["waits"]]
    if not working:
        everyone = sorted(positions)
        places = "; ".join(f"rank {rank} at {positions[rank]['place']}" for rank in everyone[:4])
        return everyone, f"no rank made progress {{since}}: all wait in collectives, {places}"
    least = min(positions[rank]["count"] for rank in working)
    silent = sorted(rank for rank in working if positions[rank]["count"] == least)
    first = positions[silent[0]]
    error = first["error"]
    after = f", after an error in its last window: {error}" if error else ""
    where = f"rank {silent[0]} stands at {first['place']}{after}".replace("{", "{{")
    return silent, f"{named_ranks(silent)} made no progress {{since}}: {where.replace('}', '}}')}"


def named_ranks(ranks: Sequence[int]) -> str:
    many = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {many}" if len(ranks) == 1 else f"ranks {many}"


_alarms: dict[int, Alarm] = {}  # by the id of the job's store


def alarm() -> Alarm:
    """Return the alarm of the default process group."""
    store = dist.distributed_c10d._get_default_store()
    if id(store) not in _alarms:
        _alarms[id(store)] = Alarm(
            store, dist.get_rank(), dist.get_world_size(), patience=_OWN_PATIENCE * _timeout()
        )
    return _alarms[id(store)]


def _timeout() -> float:
    """Return the seconds after which torch gives up on a collective of the default group."""
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):  # a backend of somebody else's
        return float(dist.default_pg_timeout.total_seconds())


def is_of_a_collective(error: BaseException) -> bool:
    """True if it was raised by torch's collectives, or while waiting for our own."""
    if not isinstance(error, RuntimeError) or isinstance(error, WholebatchError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    homes = {Path(dist.__file__).parent, Path(__file__).parent}
    innermost = Path(frames[-1].filename) if frames else Path()
    return isinstance(error, dist.DistError) or not homes.isdisjoint(innermost.parents)
