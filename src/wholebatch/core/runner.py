"""Who feeds a window: one micro-batch after the other, all in lock-step, or in two passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.compile import Execute, Executor, check_execute
from wholebatch.core import random_state
from wholebatch.core.foreign_writes import Untouched
from wholebatch.core.forward_state import ForwardState
from wholebatch.core.loss import Loss, Terms, as_loss
from wholebatch.core.precision import Precision
from wholebatch.core.splitting import batch_size_of, to_device
from wholebatch.core.units import SINGLE
from wholebatch.core.window import Window
from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import SplitGuard
from wholebatch.coupled.batchnorm.lock_step import Hold, LockStep
from wholebatch.coupled.batchnorm.lock_step_graph import Recorder
from wholebatch.coupled.batchnorm.policies import Policy
from wholebatch.coupled.batchnorm.running_statistics import Statistics
from wholebatch.coupled.contrastive.losses import Coupled, refuse_in_parts
from wholebatch.coupled.contrastive.whole_loss import WholeLoss
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.coupled.per_sample_dropout import PerSample, check_dropout
from wholebatch.errors import OptionError, UnsupportedError

__all__ = [
    "AfterMicro",
    "Feeding",
    "LossFunction",
    "check_functions",
    "find_nonfinite",
    "modules_of",
    "run_sequential",
]


LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
AfterMicro: TypeAlias = Callable[[int, int], None]


class Feeding:
    """Runs the forwards and backwards of a window by whoever its model needs.

    A model whose BatchNorms use batch statistics, with `batchnorm="exact"`, needs lock-step; a
    `Coupled` loss needs two passes (of lock-step, if it must be); any other takes one micro-batch
    after the other, each run by the executor. `model` is what the loss function is given; `root`
    holds all modules of it.
    """

    def __init__(
        self,
        model: Any,
        loss: LossFunction | Coupled,
        *,
        root: nn.Module,
        window: Window,
        precision: Precision,
        execute: Execute,
        batchnorm: str,
        hold: Hold | Literal["auto"],
        dropout: str,
        audit: bool,
    ) -> None:
        self.model = model
        self._loss = loss
        self._drop = check_dropout(dropout, root)
        self._numbers: dict[int, Sequence[int]] = {}
        self._first_number = 0
        self._audits, self._in_parts = audit, False
        self._undivided: Mapping[str, Any] | None = None
        self._window = window
        self._precision = precision
        self._device = window.target.device
        sync = window.sync
        self._norms = [*batchnorms(root), *tracked_instance_norms(root)]
        reduce = sync.sum_tensor if sync.ranks > 1 else None
        self._lock_step = LockStep(self._norms, model=root, hold=hold, reduce=reduce)
        self._untouched = Untouched(window, by="the loss function")
        self._lock_step.waits = self._untouched.remember
        self.policy: Policy | None = None
        if batchnorm != "exact":
            reduce = None if sync.counts_must_agree else reduce
            self.policy = choose_batchnorm(batchnorm, root, reduce=reduce)
        if batchnorm == "sync" and sync.ranks > 1:
            sync.counts_must_agree = True  # its layers meet the other ranks' in every forward
        self._guard = SplitGuard(root, looks=audit and not sync.counts_must_agree)
        self._whole = None
        if isinstance(loss, Coupled):
            self._whole = WholeLoss(loss, model, window=window, untouched=self._untouched)
        self.executor = Executor(
            self._executed(check_execute(execute, self._device)),
            model=root,
            loss=loss.stand_in if isinstance(loss, Coupled) else loss,
            window=window,
            precision=precision,
            device=self._device,
            eager=self._eager,
            single=SINGLE,
            keeps_moments=isinstance(self.policy, Statistics),
        )
        self.recorder = Recorder(
            self._lock_step,
            model=root,
            loss=loss.stand_in if isinstance(loss, Coupled) else loss,
            window=window,
            forward=self.forward,
            single=SINGLE,
            execute=self.executor.execute,
            sixteen_bit=precision.name in ("bf16", "fp16"),
        )

    def _executed(self, execute: Execute) -> Execute:
        """How micro-steps run: what only eager code can do is refused where a graph is asked."""
        why = None
        if self._whole is not None:
            why = "a loss of wb.Coupled runs encode twice (compile the encoder itself instead)"
        elif self._drop is not None:
            why = 'dropout="per-sample" makes its masks in Python'
        elif not isinstance(self.model, nn.Module):
            why = "several models"
        if why is not None and execute in ("compile", "graph"):
            raise OptionError(f'execute="{execute}": not possible here: {why}; use "auto"')
        return execute if why is None else "eager"

    # ------------------------------------------------------------ the windows

    def look_at(self, batch: Any, micros: Sequence[Any], layout: Mapping[str, Any]) -> None:
        """Before the first window that is split: refuse what does not add up."""
        sync = self._window.sync
        # A batch that is whole now may be cut when memory runs out: `run` looks then.
        self._undivided = layout if len(micros) == 1 else None
        if not self._guard.pending or (len(micros) == 1 and sync.ranks == 1):
            return
        encodes = isinstance(self._loss, Coupled)
        function = self._loss.encode if isinstance(self._loss, Coupled) else self._loss

        def run(few: Any) -> Any:
            with self._precision.forward():
                return function(self.model, self._moved(few))

        name = getattr(function, "__name__", "a function")
        self._guard.look(run, batch, micros, **layout, outputs=encodes, name=name, sync=sync)

    def join_look(self) -> None:
        """A rank without a sample takes part in the look of the others."""
        self._guard.join(self._window.sync)

    @property
    def numbers_samples(self) -> bool:
        """Whether `begin_window` and `run` need to know which samples are where."""
        return self._drop is not None

    def begin_window(self, samples: int = 0) -> None:
        """The first micro-batch of an attempt at a window, of so many samples, comes next."""
        self._untouched.forget()
        if self.policy is not None:
            self.policy.begin_window()
        if self._drop is not None:
            self._agree_on_samples(self._drop, samples)

    def _agree_on_samples(self, drop: PerSample, samples: int) -> None:
        """One seed for all ranks, and a number for every sample of the global batch."""
        sync = self._window.sync
        seed = drop.draw_seed()
        values = [0.0] * (1 + sync.ranks)
        values[0] = float(seed) if sync.rank == 0 else 0.0
        values[1 + sync.rank] = float(samples)
        values = sync.sum(values)
        drop.begin_window(int(values[0]))
        self._first_number = int(sum(values[1 : 1 + sync.rank]))

    def end_window(self) -> None:
        """The window's update is made."""
        if self.policy is not None:
            self.policy.end_window()

    def discard_window(self) -> None:
        """The window is over, whatever became of it."""
        if self.policy is not None:
            self.policy.discard_window()

    def run(
        self,
        micros: Sequence[Any],
        *,
        first: int,
        reduces: bool,
        before_micro: Callable[[int], None],
        after_micro: AfterMicro,
        numbers: Sequence[Sequence[int]] = (),
    ) -> None:
        """The forwards and backwards of `micros[first:]`; the last backward may reduce.

        `numbers`: of each micro-batch, its samples' places in this rank's batch.
        """
        if len(micros) > 1 and self._undivided is not None and self._window.sync.ranks == 1:
            self.look_at(micros[0], micros, {**self._undivided, "batch_size": None})
        self._numbers = {id(micro): own for micro, own in zip(micros, numbers, strict=False)}
        before = None if self._drop is None else torch.get_rng_state()
        self._run(micros, first, reduces, before_micro, after_micro)
        if before is not None:
            torch.set_rng_state(before)  # the window has drawn its seed, and nothing else counts

    def _run(
        self,
        micros: Sequence[Any],
        first: int,
        reduces: bool,
        before_micro: Callable[[int], None],
        after_micro: AfterMicro,
    ) -> None:
        together = self.in_lock_step(micros)
        self._in_parts = len(micros) > 1 or self._window.sync.ranks > 1
        if together and self._window.sync.counts_must_agree:
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: its forwards run collectives of their own, '
                'which cannot wait in step; use DDP, "statistics", "freeze", "group" or "layer"'
            )

        def before(index: int) -> None:
            before_micro(index)
            if self.policy is not None:
                self.policy.micro()  # what comes is another micro-batch

        if self._whole is not None:
            self._whole.run(
                micros,
                reduces=reduces,
                moved=self._moved,
                sampling=self._sampling,
                computing=self._precision.forward,
                between=self._between_passes,
                each=self._each_in_lock_step if together else None,
                keeps_graphs=self.policy is None,  # one that counts forwards counts the second's
                before_micro=before,
                after_micro=after_micro,
            )
        elif not together:
            run_sequential(
                self._window,
                micros,
                self.micro_step,
                first=first,
                places=self.agreed_places(len(micros)),
                reduces=reduces,
                before_micro=before_micro,
                after_micro=after_micro,
            )
        elif first < len(micros):
            self._run_in_lock_step(micros)
            after_micro(len(micros), len(micros))

    def agreed_places(self, own: int) -> int:
        """How many micro-batches every rank runs, where they must agree."""
        sync = self._window.sync
        if not sync.counts_must_agree:
            return own
        return int(sync.largest(torch.tensor(float(own), device=self._device)))

    @property
    def whole_loss(self) -> WholeLoss | None:
        """The two passes, where the loss is of the whole batch."""
        return self._whole

    def needs_every_rank(self) -> str | None:
        """Why no rank may be without data; None where one may."""
        if self._whole is not None:
            return "a loss of the whole batch (wb.Coupled) needs the representations of every rank"
        if self.needs_lock_step():
            return 'batchnorm="exact" needs every rank at every BatchNorm'
        if isinstance(self.policy, Statistics) and self.policy.spans_ranks:
            return 'batchnorm="statistics" merges the running statistics of every rank'
        return None

    def _between_passes(self) -> None:
        # What was cast without a graph leads no gradient back; autocast would keep it.
        torch.clear_autocast_cache()
        if self.policy is not None:
            self.policy.begin_window()  # the second pass counts

    # -------------------------------------------------------------- lock-step

    def hold(self, hold: Hold) -> None:
        """What lock-step begins with holding; less, if memory runs out all the same."""
        self._lock_step.begin_with(hold)

    def in_lock_step(self, micros: Sequence[Any]) -> bool:
        """Whether these micro-batches have to run together."""
        many = len(micros) > 1 or self._window.sync.ranks > 1
        return many and self.needs_lock_step()

    def needs_lock_step(self) -> bool:
        """Whether a BatchNorm would use batch statistics, or an InstanceNorm move its own, now."""
        return self.policy is None and any(uses_batch_statistics(m) for _, m in self._norms)

    def _run_in_lock_step(self, micros: Sequence[Any]) -> None:
        """All micro-batches together, meeting at every BatchNorm; done all at once."""

        def forward(micro: Any) -> tuple[Any, Loss | Terms]:
            return micro, self.forward(micro)

        def backward(made: tuple[Any, Loss | Terms]) -> None:
            # A checkpointed block draws its masks again.
            with self._sampling(made[0]), self._untouched.backward():
                self._window.add_loss(made[1])
            self._window.micro_batch_done()

        self._untouched.note_rates()  # all losses may come before the first backward
        self.recorder.run(
            micros, lambda: self._lock_step.run(micros, forward=forward, backward=backward)
        )

    def _each_in_lock_step(
        self,
        items: Sequence[tuple[int, Any]],
        forward: Callable[[tuple[int, Any]], Any],
        backward: Callable[[Any], Any],
    ) -> list[Any]:
        return self._lock_step.run(items, forward=forward, backward=backward)

    # ---------------------------------------------------------- a micro-batch

    def forward(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """The loss of a micro-batch, in the window's precision and on the model's device."""
        with self._sampling(micro):
            return self._computed(micro, loss_function or self._loss)

    def _computed(self, micro: Any, loss_function: LossFunction | Coupled) -> Loss | Terms:
        assert not isinstance(loss_function, Coupled)
        micro = to_device(micro, self._device)
        with self._precision.forward():
            loss = as_loss(loss_function(self.model, micro))
        if self._in_parts and self._audits:
            refuse_in_parts(loss)
        if self.policy is not None:
            self.policy.micro()
        return loss

    def micro_step(self, micro: Any) -> None:
        """Forward and backward of a micro-batch, entered in the window."""
        with self._sampling(micro):
            self.executor.micro_step(micro)

    def _eager(self, micro: Any, loss_function: LossFunction) -> Loss | Terms:
        loss = self._computed(micro, loss_function)
        if self.executor.by_autograd:
            with self._untouched.backward():
                self._window.add_loss(loss)
        else:  # a graph may have added to the gradients since the last eager micro-step
            self._window.add_loss(loss)
        return loss

    def _moved(self, micro: Any) -> Any:
        return to_device(micro, self._device)

    def _sampling(self, micro: Any) -> AbstractContextManager[None]:
        """Where the masks of dropout follow their samples: within it they are those of `micro`."""
        if self._drop is None:
            return nullcontext()
        numbers = self._numbers.get(id(micro))
        if numbers is None:  # a stand-in, which is not counted
            numbers = range(batch_size_of(micro))
        return self._drop.micro(torch.tensor(numbers) + self._first_number)

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What an open window holds beside its gradients."""
        return {
            "batchnorm": None if self.policy is None else self.policy.state_dict(),
            "dropout": None if self._drop is None else (self._drop.seed, self._first_number),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with the window of `state_dict`."""
        if self.policy is not None and saved["batchnorm"] is not None:
            self.policy.load_state_dict(saved["batchnorm"])
        if self._drop is not None and saved.get("dropout") is not None:
            seed, self._first_number = saved["dropout"]
            if seed is not None:
                self._drop.begin_window(seed)


def check_functions(loss: object, units: object) -> None:
    """Refuse what cannot be called, and units where the loss brings its own."""
    if isinstance(loss, Coupled):
        if units is not None:
            raise OptionError(
                "units= with wb.Coupled: the loss of the whole batch returns its units before any "
                "backward; leave units= out"
            )
    elif not callable(loss):
        raise OptionError(f"loss={loss!r}: must be a function, or wb.Coupled")
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function")


def modules_of(model: Any) -> tuple[nn.Module, list[nn.Module]]:
    """One module that holds everything, and the models one by one."""
    if isinstance(model, nn.Module):
        return model, [model]
    several = isinstance(model, Mapping | Sequence)
    models = list(model.values() if isinstance(model, Mapping) else model) if several else []
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise OptionError(
            f"model={type(model).__name__}: must be an nn.Module, or a list or dict of them"
        )
    if isinstance(model, Mapping):
        return nn.ModuleDict(dict(model)), models
    return nn.ModuleList(models), models


def run_sequential(
    window: Window,
    micros: Sequence[Any],
    micro_step: Callable[[Any], None],
    *,
    first: int = 0,
    places: int | None = None,
    stand_in: Any = None,
    reduces: bool = True,
    before_micro: Callable[[int], None] | None = None,
    after_micro: Callable[[int, int], None] | None = None,
) -> None:
    """Feed the window with `micros[first:]`; the last backward reduces the gradients.

    With `reduces=False` no backward does, and the close reduces them.

    `micro_step(micro)` makes one micro-batch's forward and backward and enters it in the window.
    `places` is the number that all ranks have agreed on: a rank with fewer micro-batches runs its
    last one again (or `stand_in`, if it has none), with weight zero and its buffers put back.
    """
    places = len(micros) if places is None else places
    for index in range(first, places):
        window.closing = reduces and index == places - 1
        if before_micro is not None:
            before_micro(index)
        if index < len(micros):
            micro_step(micros[index])
            window.micro_batch_done()
            if after_micro is not None:
                after_micro(index + 1, len(micros))
        else:
            before = [ForwardState(model) for model in window.target.models]
            window.weightless = True
            micro_step(micros[-1] if micros else stand_in)
            window.weightless = False
            for snapshot in before:
                snapshot.restore()


def find_nonfinite(
    model: nn.Module,
    micros: Sequence[Any],
    forward: Callable[[Any], Loss | Terms],
    start: dict[str, Any],
) -> tuple[int | None, str]:
    """The first micro-batch whose gradient is not finite, and a sentence that says so.

    `start` is the random state before the first of them; buffers and random state are left as
    they are found.
    """
    now = ForwardState(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    random_state.restore(start)
    try:
        for index, micro in enumerate(micros):
            loss = forward(micro)
            terms = [loss] if isinstance(loss, Loss) else list(loss.by_name.values())
            gradients = torch.autograd.grad(
                [term.total for term in terms], parameters, allow_unused=True
            )
            for (name, _), gradient in zip(named, gradients, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    return index, (
                        f"Replayed, micro-batch {index + 1} of {len(micros)} is the first "
                        f"whose gradient is not finite, at parameter {name}"
                    )
    finally:
        now.restore()
    return None, (
        "Replayed, no micro-batch has such a gradient alone: their sum overflows, or a gradient "
        "hook or on_gradient= has made it so"
    )
