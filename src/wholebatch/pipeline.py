"""Pipeline: the update of the whole batch from a model that is split into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from wholebatch.batch import batch_size_of, split, to_device
from wholebatch.batch.samples import is_positive
from wholebatch.coupled.normalisation_layers import (
    uses_batch_statistics,
    whole_batch_norms,
)
from wholebatch.distributed.pipelined import Pipelined
from wholebatch.errors import LossError, OptionError, UnsupportedError
from wholebatch.losses.loss import SINGLE, Loss, Term, Units, as_loss
from wholebatch.options import Close, close_options, close_with_only
from wholebatch.window.ledger import HasLedger, Ledger
from wholebatch.window.model_and_optimizer import Scheduler, build_target
from wholebatch.window.saved_state import load_state, state_of
from wholebatch.window.window import Step

Stage: TypeAlias = pipelining.PipelineStage
LossFunction: TypeAlias = Callable[[Any, Any], Loss | Tensor]

_SCHEDULES: dict[str, type[Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
}


class PipelineRunner:
    """The stages of this rank, run under a schedule that fits the current batch.

    Schedules need equal shapes, and some need a certain number of micro-batches. So the inputs are
    padded with copies of the last sample. The outputs of the copies are cut off before the loss:
    their gradient is exactly zero, and the loss and its units are those of the batch.
    """

    def __init__(
        self,
        stage: Stage,
        ledger: Ledger,
        sync: Pipelined,
        *,
        schedule: str,
        micro_batch: int,
        loss: LossFunction,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise OptionError(
                f"schedule={schedule!r}: must be one of {', '.join(map(repr, _SCHEDULES))}"
            )
        self._stage, self._ledger, self._sync = stage, ledger, sync
        self._kind, self._size, self._loss = schedule, micro_batch, loss
        self._device = torch.device(stage.device)
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._schedule: Any = None
        self._places = 0
        self._shapes: list[Any] = []
        self._targets: list[Any] = []
        self._samples = 0
        self._made: dict[int, tuple[Tensor, Units]] = {}  # totals and units, on the last stage

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> int:
        """Check the batch together with the other stages, and return its number of samples."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
        self._targets = []
        if self.is_last and target is not None:
            sizes.add(batch_size_of(target))
            self._targets = split(target, self._size)
        shapes = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
        mine = [
            float(max(sizes, default=-math.inf)),
            -float(min(sizes, default=math.inf)),
            float(self.is_first and not args),
            float(self.is_last and target is None),
            float(shapes != self._shapes),
        ]
        # One small collective, so that all ranks raise: if only one did, the others would hang.
        asked = torch.tensor(mine, dtype=torch.float64, device=self._device)
        most, least, no_input, no_target, changed = self._sync.stages.largest(asked).tolist()
        self._shapes = shapes
        if no_input or no_target:
            what = "inputs" if no_input else "target="
            where = "first" if no_input else "last"
            raise OptionError(f"step() without {what} on the rank of the {where} stage: give them")
        if most != -least:
            raise OptionError(
                f"tensors with different first dimensions ({-least:g} and {most:g}): every tensor "
                "of every stage's inputs and target has one entry per sample of the same batch"
            )
        self._samples = int(most)
        self._fit(changed=bool(changed))
        return self._samples

    def _fit(self, *, changed: bool) -> None:
        """Build a schedule for this number of micro-batches and these shapes."""
        places = math.ceil(self._samples / self._size)
        if self._kind == "1f1b":  # it needs as many as there are stages; the rest are empty
            places = max(places, self._stage.group_size)
        if self._schedule is not None and places == self._places and not changed:
            return
        self._places = places
        for name in ("inputs_meta", "_outputs_meta") if changed else ():
            if hasattr(self._stage, name):  # torch 2.11 keeps the first shapes that it sees.
                setattr(self._stage, name, None)
        self._schedule = _SCHEDULES[self._kind](
            self._stage, n_microbatches=places, loss_fn=self._scaled_loss, scale_grads=False
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run all forwards and backwards; on the last stage, enter the losses in the window."""
        self._made = {}
        args, kwargs = self._filled_up(args, kwargs)
        index = torch.arange(self._places).repeat_interleave(self._size) if self.is_last else None
        try:
            self._schedule.step(*args, target=index, return_outputs=False, **kwargs)
        finally:
            self._targets = []
        ledger = self._ledger
        losses = [{SINGLE: Term(*made)} for _, made in sorted(self._made.items())]
        for place in range(math.ceil(self._samples / self._size)):
            ledger.record(losses[place] if losses else {})  # the other stages have none
            ledger.end_micro_batch()

    def _filled_up(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows = torch.arange(self._places * self._size).clamp(max=self._samples - 1)

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            whole = leaf if len(rows) == len(leaf) else leaf.index_select(0, rows.to(leaf.device))
            return whole.to(self._device)

        batch = (args if self.is_first else (), kwargs)
        filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(fill, batch)
        return filled

    def _scaled_loss(self, output: Any, index: Tensor) -> Tensor:
        """Return the seeded loss of one micro-batch, without the padding, and keep it.

        Torch makes one extra call to infer shapes. A later call for the same place replaces it.
        """
        place = int(index[0])
        real = max(0, min(self._size, self._samples - place * self._size))
        output = pytree.tree_map(
            lambda leaf: leaf[:real] if isinstance(leaf, Tensor) and leaf.dim() else leaf, output
        )
        if real == 0:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            return torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum()
        result = as_loss(self._loss(output, to_device(self._targets[place], self._device)))
        if not isinstance(result, Loss):
            raise LossError(
                "a loss of several terms in a pipeline: return one wb.Loss(total, units), or "
                "per-unit losses"
            )
        units = result.units
        units = units.detach() if isinstance(units, Tensor) else units
        self._made[place] = (result.total.detach(), units)
        return result.total * self._ledger.seed_of(SINGLE, result.total, 1.0)


class Pipeline(HasLedger):
    """A pipeline with a stage on every rank; `step` makes the update of the undivided batch.

    ```python
    stage = PipelineStage(my_part, rank, number_of_stages, device)
    optimizer = torch.optim.AdamW(my_part.parameters())
    train = wb.Pipeline(stage, optimizer, loss=wb.cross_entropy, micro_batch=4, clip_norm=1.0)
    for batch in loader:
        step = train.step(batch["tokens"], target=batch["labels"])
    ```

    Call `step` on every rank with the same batch (ranks in the middle may leave it out). A batch
    that does not divide evenly is padded; the padding never reaches the loss.

    Args:
        stage: This rank's stage.
        optimizer: The optimizer of this rank's stages, or several.
        loss: A function `loss(output, target)` that returns `wb.Loss(total, units)` or a tensor of
            per-unit losses. It runs on the last stage.
        micro_batch: Samples per micro-batch.
        schedule: The order of forward and backward passes.
        data_parallel: The process group of the ranks that hold replicas of the same stages.
        clip_norm: Clip the gradient of all stages together to this norm.
        scheduler: A learning-rate scheduler, or several. Each is stepped once per update.
        close: `wb.Close(...)`: `clip_value`, `nonfinite` and `zero_units`.
    """

    def __init__(
        self,
        stage: PipelineStage,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss: LossFunction,
        micro_batch: int,
        schedule: Literal["gpipe", "1f1b"] = "1f1b",
        data_parallel: dist.ProcessGroup | None = None,
        clip_norm: float | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        close: Close | None = None,
    ) -> None:
        _check_stage(stage)
        if not callable(loss):
            raise OptionError(f"loss={loss!r}: must be a function of output and target")
        if not is_positive(micro_batch):
            raise OptionError(f"micro_batch={micro_batch!r}: must be a positive number of samples")
        if isinstance(clip_norm, Sequence):
            raise OptionError(
                f"clip_norm={clip_norm!r} in a pipeline: stages have parameter groups of their "
                "own; give one number, for the norm over all stages"
            )
        modules = [stage.submod]
        allowed = ("clip_value", "nonfinite", "zero_units")
        options = close_options(close_with_only(close, *allowed, where="in a pipeline"), clip_norm)
        sync = Pipelined(modules, stage.group, data_parallel, torch.device(stage.device))
        target = build_target(modules, optimizer, options=options, scheduler=scheduler, sync=sync)
        self._ledger = Ledger(target, options, sync)
        self._norms = [pair for module in modules for pair in whole_batch_norms(module)]
        self._refuse_batch_statistics()
        self._runner = PipelineRunner(
            stage, self._ledger, sync, schedule=schedule, micro_batch=micro_batch, loss=loss
        )
        self.last_step: Step | None = None

    def step(self, *inputs: Any, target: Any = None, **keywords: Any) -> Step:
        """Make one update from the whole batch; every rank gets the same report.

        Every tensor has one entry per sample, in its first dimension.

        Args:
            *inputs: The inputs of the first stage.
            target: The targets, for the loss.
            **keywords: Keyword inputs of the stages of the rank that passes them.
        """
        ledger, runner = self._ledger, self._runner
        samples = runner.prepare(inputs, keywords, target)
        self._refuse_batch_statistics()
        ledger.begin(samples)
        try:
            runner.run(inputs, keywords)
            self._drop_strangers()
            self.last_step = ledger.close()
            return self.last_step
        finally:
            if ledger.open is not None:
                ledger.discard()

    def _refuse_batch_statistics(self) -> None:
        for name, module in self._norms:
            if uses_batch_statistics(module):
                raise UnsupportedError(
                    f"{type(module).__name__} {name!r} in a pipeline: it would normalise with each "
                    "micro-batch alone; put it into evaluation mode, or use GroupNorm or LayerNorm"
                )

    def _drop_strangers(self) -> None:
        """Clear the gradients of parameters that no optimizer steps; backward computes them too."""
        own = {id(parameter) for parameter in self._ledger.inputs}
        for module in self._ledger.target.models:
            for parameter in module.parameters():
                if id(parameter) not in own:
                    parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from between steps, without stages and optimizers."""
        return state_of(self._ledger, "Pipeline")

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict`; call it after the stages and optimizers are loaded."""
        load_state(self._ledger, "Pipeline", saved)


def _check_stage(stage: Any) -> None:
    if not isinstance(stage, PipelineStage):
        raise OptionError(
            f"stage={type(stage).__name__}: must be a torch.distributed.pipelining.PipelineStage"
        )
    for kind in (DistributedDataParallel, FSDPModule):
        if any(isinstance(module, kind) for module in stage.submod.modules()):
            raise UnsupportedError(
                f"the stage is wrapped in {kind.__name__}: it would reduce gradients in addition "
                "to the window; pass the plain module, and as data_parallel= the process group of "
                "the ranks that hold replicas of this stage"
            )
