"""Pipeline: the update of the whole batch from a model that is split into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from wholebatch.core import state_dict as state
from wholebatch.core.loss import SINGLE
from wholebatch.core.model_and_optimizer import Scheduler, build_target
from wholebatch.core.options import Close
from wholebatch.core.window import Step, Window
from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.distributed.pipeline_stages import LossFunction, Pipelined, PipelineRunner
from wholebatch.errors import OptionError, UnsupportedError


class Pipeline:
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
        stage: This rank's stage; a list of stages with "interleaved".
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
        stage: PipelineStage | Sequence[PipelineStage],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss: LossFunction,
        micro_batch: int,
        schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b",
        data_parallel: dist.ProcessGroup | None = None,
        clip_norm: float | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        close: Close | None = None,
    ) -> None:
        stages = _stages(stage)
        if not callable(loss):
            raise OptionError(f"loss={loss!r}: must be a function of output and target")
        if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
            raise OptionError(f"micro_batch={micro_batch!r}: must be a positive number of samples")
        if isinstance(clip_norm, Sequence):
            raise OptionError(
                f"clip_norm={clip_norm!r} in a pipeline: stages have parameter groups of their "
                "own; give one number, for the norm over all stages"
            )
        modules = [one.submod for one in stages]
        close = Close.of(close)
        refused = {"on_gradient", "scaler", "ema", "sync"} & close.given()
        if refused:
            raise OptionError(
                f"wb.Close({', '.join(f'{name}=' for name in sorted(refused))}) in a pipeline: it "
                "takes clip_value=, nonfinite= and zero_units= only"
            )
        options = close.with_clip_norm(clip_norm)
        sync = Pipelined(modules, stages[0].group, data_parallel, torch.device(stages[0].device))
        target = build_target(
            modules,
            optimizer,
            options=options,
            scheduler=scheduler,
            sync=sync,
        )
        self._window = Window(target, options, sync)
        self._norms = [
            pair for m in modules for pair in (*batchnorms(m), *tracked_instance_norms(m))
        ]
        self._refuse_batch_statistics()
        self._runner = PipelineRunner(
            stages,
            schedule=schedule,
            micro_batch=micro_batch,
            loss=loss,
            largest=lambda values: sync.stages.largest(values.to(torch.device(stages[0].device))),
        )
        self.last_step: Step | None = None

    @property
    def updates(self) -> int:
        """The number of updates made so far."""
        return self._window.updates

    @property
    def skipped(self) -> int:
        """The number of windows that made no update (not finite, or without units)."""
        return self._window.skipped

    def step(self, *inputs: Any, target: Any = None, **keywords: Any) -> Step:
        """Make one update from the whole batch; every rank gets the same report.

        Every tensor has one entry per sample, in its first dimension.

        Args:
            *inputs: The inputs of the first stage.
            target: The targets, for the loss.
            **keywords: Keyword inputs of the stages of the rank that passes them.
        """
        window, runner = self._window, self._runner
        samples = runner.prepare(inputs, keywords, target)
        self._refuse_batch_statistics()
        now = window.begin(samples)
        try:
            entries = runner.run(inputs, keywords, self._seed)
            for entry in entries:
                now.record({SINGLE: entry.total}, {SINGLE: entry.units}, {SINGLE: 1.0})
                now.micro_batches += 1
            now.micro_batches = runner.micro_batches  # Also on ranks that compute no loss.
            self._drop_strangers()
            self.last_step = window.close()
            return self.last_step
        finally:
            if window.open is not None:
                window.discard()

    def _seed(self, total: Tensor) -> Tensor:
        return self._window.current.seed_of(SINGLE, total, 1.0)

    def _refuse_batch_statistics(self) -> None:
        for name, module in self._norms:
            if uses_batch_statistics(module):
                raise UnsupportedError(
                    f"{type(module).__name__} {name!r} in a pipeline: it would normalise with each "
                    "micro-batch alone; put it into evaluation mode, or use GroupNorm or LayerNorm"
                )

    def _drop_strangers(self) -> None:
        """Clear the gradients of parameters that no optimizer steps; backward computes them too."""
        own = {id(parameter) for parameter in self._window.inputs}
        for module in self._window.target.models:
            for parameter in module.parameters():
                if id(parameter) not in own:
                    parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from between steps, without stages and optimizers."""
        return state.progress("Pipeline", self._window)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict`; call it after the stages and optimizers are loaded."""
        state.load_progress("Pipeline", self._window, saved)


def _stages(stage: Any) -> list[PipelineStage]:
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    if not stages or not all(isinstance(one, PipelineStage) for one in stages):
        raise OptionError(
            f"stage={type(stage).__name__}: must be a torch.distributed.pipelining.PipelineStage, "
            'or a list of them for schedule="interleaved"'
        )
    for one in stages:
        inside: list[nn.Module] = list(one.submod.modules())
        for kind in (DistributedDataParallel, FSDPModule):
            if any(isinstance(module, kind) for module in inside):
                raise UnsupportedError(
                    f"stage {one.stage_index} is wrapped in {kind.__name__}: its reduction would "
                    "run beside the window's; give the plain module, and data_parallel=, the "
                    "process group of the ranks that hold replicas of this stage"
                )
    return stages
