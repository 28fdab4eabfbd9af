"""Compute what a loop computes around its models also with one sample in the place of another.

The graph of a loss does not show what was detached: a mean over the micro-batch, a threshold, a
teacher's BatchNorm. So every call of torch on the micro-batch, or on outputs of the models, is made
again with sample k in the place of sample j. If each sample counts by itself,

    the inputs of the models, and d loss / d outputs, stay the same in every row but j
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from wholebatch.compile.captured_state import version_of
from wholebatch.coupled.followed_tensor import Follower, followers, tensors_in
from wholebatch.coupled.normalisation_layers import known_norms
from wholebatch.window.forward_state import capture_random, restore_random, same_random

_log = logging.getLogger("wholebatch")

_MOST_CALLS = 4096
_MOST_ELEMENTS = 1 << 24  # of a tensor that has variants
_MANY = 1 << 20  # Above it, a tensor has few of them.

_Key = tuple[str, int, int]  # what has another sample, where, and which one
_SAME: _Key = ("", 0, 0)


@dataclass(frozen=True, slots=True)
class Dependence:
    """A loss, or an input of a model, in which the row of one sample depends on other samples."""

    of: str  # "loss", or "input" of a model
    through: str  # "outputs" of a model, or "data" of the micro-batch
    norm: str | None  # a BatchNorm in training mode that the loop runs


class LoopVariants(Follower):
    """Follows the tensors of one micro-batch, but not between `enter` and `leave`."""

    def __init__(self) -> None:
        super().__init__()
        self.stop(clear=True)

    # ------------------------------------------------------------------ following

    def start(self, batch: Sequence[Tensor] = ()) -> None:
        """Follow these tensors of the micro-batch, and what models give back.

        One loop is followed at a time: this ends the one before.
        """
        for other in (self, *followers()):
            if isinstance(other, LoopVariants):
                other.stop(clear=True)
        super().start()
        size = max((one.numel() for one in batch), default=0)
        for one in batch if size <= _MOST_ELEMENTS else ():
            if len(one) == len(batch[0]):
                keys = _keys("data", len(one), size)
                self.note(one, {key: _replaced(one, key) for key in keys})

    def stop(self, *, clear: bool = False) -> None:
        """Follow no more; `clear` what was found."""
        super().stop(clear=clear)
        if clear:
            self._calls = 0
            self._moved: dict[_Key, set[int]] = {}  # rows of inputs of the models
            self._reordered: set[_Key] = set()
            self._outputs = 0
            self._leaves: dict[_Key, dict[int, Tensor]] = {}  # the outputs, by their number
            self._norm: str | None = None
            self._foreign = False  # a BatchNorm has run that another window makes exact

    def enter(self, given: Sequence[Tensor]) -> None:
        """Leave out what a model does with these tensors, until `leave`."""
        if not self.on:
            return
        self.pause(True)
        for one in given:
            for key, value in self._variants(one).items():
                rows = _moved_rows(one, value, len(given[0])) if key != _SAME else set()
                self._moved.setdefault(key, set()).update(rows)
                if len(rows) > 1 and _is_reordered(one, value):
                    self._reordered.add(key)

    def leave(self, outputs: Sequence[Tensor], rows: int) -> None:
        """Go on: a model has given these tensors back, for so many samples."""
        if not self.on:
            return
        self.pause(False)
        earlier = {key for variants in self.notes.values() for key in variants}
        for one in outputs:
            self._outputs += 1
            if not one.is_floating_point() or one.numel() > _MOST_ELEMENTS:
                continue
            keys = _keys("outputs", rows, one.numel()) if len(one) == rows else []
            variants = {}
            for key in {_SAME, *earlier, *keys}:
                leaf = _replaced(one, key) if key in keys else one.detach().clone()
                self._leaves.setdefault(key, {})[self._outputs] = leaf.requires_grad_()
                variants[key] = leaf.view_as(leaf)  # A loop may write into it.
            self.note(one, variants)

    def see(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        """Look at a call before it is made; return what makes it again with the variants."""
        self._calls += 1
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if self._calls > _MOST_CALLS or captures or _get_current_dispatch_mode_stack():
            self.stop(clear=True)  # The loop may have been left long ago.
            return lambda _: None
        name, given = getattr(func, "__name__", ""), tensors_in(args, kwargs)
        keys = {key for one in given for key in self._variants(one)}
        if "c10d" in str(getattr(func, "__module__", "")):  # Other ranks make it once.
            return lambda _: self._gather(name, args, kwargs)
        if not keys:
            return lambda _: None
        writes = name.startswith("__i") or name == "__setitem__" or name[-1:] == "_" != name[-2:-1]
        for one in tensors_in(args[:1]) if writes else ():
            missing = {key: one.detach().clone() for key in keys - self._variants(one).keys()}
            self.note(one, missing | self._variants(one))
        versions = [version_of(one) for one in given]
        random: Any = None if name == "__get__" else capture_random(every=False)

        def after(result: Any) -> None:
            pairs = zip(given, versions, strict=True)
            written = {id(one) for one, was in pairs if version_of(one) != was}
            made = tensors_in(result)
            if not (made or written) or name == "grad" or func == Tensor.grad.__get__:  # type: ignore[union-attr]
                return  # The gradients of a model need the model.
            if func is F.batch_norm and (*args, *[kwargs.get("training", False)] * 6)[5]:
                self._norm = f"BatchNorm{max(1, given[0].dim() - 2)}d"
                buffers = {id(norm.running_mean) for norm in known_norms}
                self._foreign = self._foreign or any(id(one) in buffers for one in given[1:])
            if "norm" in name:  # Running statistics are written, and their version stays.
                written |= {id(one) for one in given if not self._variants(one)}
            found: list[dict[_Key, Tensor]] = [{} for _ in made]
            random_after = random and capture_random(every=False)
            drawn = not same_random(random, random_after)
            try:
                with torch._C.DisableTorchFunction(), plain_autograd():
                    for key in keys:
                        if drawn:
                            restore_random(random)
                        others = self._with_variants((args, kwargs), key, written)
                        again = tensors_in(func(*others[0], **others[1]))
                        for variants, one in zip(found, again, strict=True):
                            variants[key] = one
                for one, variants in zip(made, found, strict=True):
                    self.note(one, variants)
            except Exception as error:  # of a call that cannot be made so
                _log.debug("a call of the loop could not be made with other samples: %r", error)
                self.stop(clear=True)
            if drawn:
                restore_random(random_after)

        return after

    def _gather(self, name: str, args: Any, kwargs: Any) -> None:
        """Note what was gathered over the ranks, with the variants in the part of this rank."""
        if not name.startswith("all_gather") or kwargs.get("async_op"):
            return
        (outputs, given), rank = args, torch.distributed.get_rank(kwargs.get("group"))
        own = outputs[rank] if isinstance(outputs, list) else outputs
        start = 0 if isinstance(outputs, list) else rank * given.numel()
        variants = {key: own.detach().clone() for key in self._variants(given)}
        for key, whole in variants.items():
            whole.view(-1)[start : start + given.numel()] = self._variants(given)[key].flatten()
        self.note(own, variants)

    def _variants(self, tensor: Any) -> dict[_Key, Tensor]:
        found: dict[_Key, Tensor] = self.notes.get(tensor, {}) if isinstance(tensor, Tensor) else {}
        return found

    def _with_variants(self, tree: Any, key: _Key, written: set[int]) -> Any:
        """Return arguments with this variant of their tensors; never what a call writes into."""

        def other(one: Tensor) -> Tensor:
            found = self._variants(one).get(key)
            if found is None:
                return one.detach().clone() if id(one) in written else one
            return found

        return tree_map_only(Tensor, other, tree)

    # ------------------------------------------------------------------ what has moved

    def dependence(
        self, loss: Tensor, units: Any, rows: int, *, is_mean: bool
    ) -> Dependence | bool | None:
        """Return what depends on other samples than its own; None if nothing does.

        There are `rows` samples. False: it cannot be told from this micro-batch.
        """
        number, counts = float(units), self._variants(units)
        try:
            slopes = {
                key: self._slopes(key, one * counts.get(key, units) if is_mean else one)
                for key, one in self._variants(loss).items()
            }
        except Exception as error:  # of a graph that was used already, for one
            _log.debug("the loss has no gradients with other samples: %r", error)
            return False
        # Units that are a number would change with the sample if they count some of its parts.
        may_scale = not counts and number % max(rows, 1) != 0
        for key in sorted((self._moved.keys() | slopes.keys()) - {_SAME}, reverse=True):
            through, j, _ = key
            if key in self._reordered or (self._foreign and through == "data"):
                continue  # Sorted by length, for one: the outputs are in another order.
            moved = self._moved.get(key, set())
            now: set[int] = set()
            for place, was in slopes.get(_SAME, {}).items() if key in slopes else ():
                value = slopes[key].get(place)
                now |= _moved_rows(was, value, rows, may_scale=may_scale)
            # A loop may shuffle its samples: then another row moves, and only that one.
            own = {j} if through == "outputs" else set()
            if rows - len(moved | now | own) + 1 < min(number, rows):
                of = "input" if len(moved | own) > 1 else "loss"
                return Dependence(of, through, self._norm)
        return None if _SAME in slopes and rows > 1 else False

    def _slopes(self, key: _Key, loss: Tensor) -> dict[int, Tensor | None]:
        leaves = self._leaves.get(key, {})
        if not leaves or not loss.requires_grad:
            return {}
        slopes = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, retain_graph=True
        )
        return dict(zip(leaves, slopes, strict=True))


def _keys(through: str, rows: int, elements: int) -> list[_Key]:
    """Return places of samples, and samples to put there."""
    places = range(0, rows, max(1, rows // 4)) if elements <= _MANY else [0]
    return [(through, j, (j + k) % rows) for j, k in product(places, (1, (rows + 1) // 2))]


def _replaced(tensor: Tensor, key: _Key) -> Tensor:
    other = tensor.detach().clone()
    other[key[1]] = tensor.detach()[key[2]]
    return other


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Keep what is saved for a backward here from a checkpoint or offload that is being made."""
    private = torch._C._autograd
    hooks = []
    topmost = getattr(private, "_top_saved_tensors_default_hooks", None)  # since torch 2.7
    while topmost is not None and (top := topmost(True)) is not None:
        private._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            private._push_saved_tensors_default_hooks(pack, unpack)


def _moved_rows(
    was: Tensor | None, now: Tensor | None, rows: int, *, may_scale: bool = False
) -> set[int]:
    """Return the rows that are others now; `may_scale`, but for a factor that most of them have."""
    if was is None or now is None or was.shape != now.shape or was.shape[:1] != (rows,):
        return set()
    if not was.numel():
        return set()
    a, b = _numbers(was), _numbers(now)
    exact = was.dtype if was.is_floating_point() or was.is_complex() else torch.float64
    factor = float((b[a != 0] / a[a != 0]).median()) if may_scale and bool(a.any()) else 1.0
    moved = (b - factor * a).abs().amax(1) > torch.finfo(exact).eps ** 0.5 * a.abs().amax()
    return set(moved.nonzero().flatten().tolist())


def _is_reordered(was: Tensor, value: Tensor) -> bool:
    """True if the rows are the same in another order, but for the one that was replaced."""
    every = max(1, was[0].numel() // 256)
    a, b = _numbers(was)[:, ::every], _numbers(value)[:, ::every]
    near = torch.cdist(b, a, p=float("inf")).amin(1) <= 1e-9 * float(a.abs().amax())
    return int(near.sum()) >= len(was) - 1


def _numbers(tensor: Tensor) -> Tensor:
    """Return the real numbers of each row, on the host."""
    plain = tensor.detach().resolve_conj()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.double().reshape(len(real), -1).cpu()
