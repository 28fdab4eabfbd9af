"""DeepSpeed, ZeRO 0 to 3: its engine owns backward, reduction and step; the window owns the scale.

DeepSpeed would divide by its accumulation steps (`scale_wrt_gas`): that is switched off. It
averages over the ranks: the seed of every backward undoes that. After the window's last backward
each rank holds its slice of the reduced gradients (ZeRO 1-3: `optimizer.averaged_gradients`; ZeRO
0: `.grad`), and there the close applies its one factor, before `engine.step()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Parameters, ReducesInLastBackward
from wholebatch.errors import NonFiniteError, OptionError, UnsupportedError, WindowError


class EngineOptimizer(torch.optim.Optimizer):
    """The model's parameters in their groups, stepped by the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.stands_for = (engine.optimizer, engine.basic_optimizer)
        super().__init__([{"params": group} for group in _groups(engine)], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with _without_own_clipping(self._engine):
            self._engine.step()
        if getattr(self._engine.optimizer, "overflow", False):
            raise NonFiniteError(
                "DeepSpeed found its gradient norm beyond float32 and skipped the update: "
                "parameters and optimizer state are as before this window"
            )


class DeepSpeed(ReducesInLastBackward):
    """A model that `deepspeed.initialize` has wrapped."""

    # Graphs end in hooks, which only the engine's own backward() runs. ZeRO 3 gathers in forwards,
    # ZeRO 2 and 3 reduce in every backward.
    owns_step = True
    engine_name = "a DeepSpeed engine"

    def __init__(self, engine: Any, *, sync: str = "auto") -> None:
        _check(engine)
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._offloads = _is_on(engine.zero_offload_optimizer())
        if sync == ("hold" if self._stage >= 2 else "every"):
            raise OptionError(f"sync={sync!r} with ZeRO {self._stage}: it cannot; leave it out")
        device = next(engine.module.parameters()).device
        super().__init__(Group([dist.group.WORLD], device, rank=dist.get_rank()))
        self.replicas = self.group if self._stage < 3 else None
        averages = engine.gradient_average or self._stage == 3
        self.averaged_by = float(self.ranks) if averages else 1.0
        self.owns_hooks = self._stage > 0
        # The engine would clip the undivided batch too; its default is 1.0.
        self.clip_norm = float(engine.gradient_clipping()) or None
        self._failed = False

    def optimizer(self, optimizer: Any) -> EngineOptimizer:
        engine = self._engine
        if not any(
            optimizer is known for known in (engine, engine.optimizer, engine.basic_optimizer)
        ):
            raise OptionError(
                f"optimizer={type(optimizer).__name__}: a DeepSpeed engine steps its own; pass "
                "engine.optimizer"
            )
        return EngineOptimizer(engine)

    def check(self, **options: Any) -> None:
        if options["clips"]:
            if (
                self.clip_norm is not None
                and "gradient_clipping" in self._engine._config._param_dict
            ):
                raise OptionError(
                    f"gradient_clipping={self.clip_norm:g} in DeepSpeed's configuration beside "
                    "clip_norm= or clip_value=: give one"
                )
            self.clip_norm = None
        if options["scaler"] is not None:
            raise UnsupportedError(
                "scaler= with a DeepSpeed engine: the engine's backward takes no scaler, and "
                "DeepSpeed's fp16 is not tested to be exact; leave it out and train in float32"
            )
        if options["precision"] not in ("full", "fp32"):
            raise UnsupportedError(
                f"precision={options['precision']!r} with a DeepSpeed engine: it switches off an "
                'autocast around it; use precision="full" with its own bf16 (ZeRO 2 and 3), or '
                "another precision with DDP or fully_shard"
            )
        if self._stage == 3 and options["ema"] is not None:
            raise UnsupportedError(
                "ema= with ZeRO 3: no rank holds whole parameters to average; use ZeRO 2"
            )
        own = self._engine.lr_scheduler
        if own is not None and any(own is each for each in options["schedulers"]):
            raise OptionError(
                "scheduler= is the one that deepspeed.initialize got: the engine steps it already, "
                "and it would move twice per update; give it to one of the two"
            )

    def begin(self, parameters: Parameters) -> None:
        super().begin(parameters)
        if self._failed:
            raise WindowError(
                "a backward of this DeepSpeed engine failed half way, and its buckets still hold "
                "part of it: build the engine again and load the last checkpoint"
            )
        if self._stage > 0 and any(parameter._backward_hooks for parameter in parameters):
            raise UnsupportedError(
                f"a parameter has a gradient hook: with ZeRO {self._stage} no rank holds the whole "
                "gradient that the hook needs; remove it"
            )

    @contextmanager
    def backward(self, parameters: Parameters, *, last: bool) -> Iterator[None]:
        if last and self._stage == 1:
            # Buckets are filled with the gradients that are there: they must be the same ones
            # on all ranks, also where one rank has not used a parameter.
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        try:
            with super().backward(parameters, last=last):
                yield
        except BaseException:
            self._failed = True
            raise

    def switch(self, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def run_backward(
        self, totals: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        scaled = [total * seed for total, seed in zip(totals, seeds, strict=True)]
        self._engine.backward(torch.stack(scaled).sum(), scale_wrt_gas=False)

    def holders(self, groups: Sequence[Sequence[nn.Parameter]]) -> Sequence[Sequence[Any]]:
        if self._stage == 0:
            return groups
        optimizer = self._engine.optimizer
        slices: list[list[Any]] = [[] for _ in groups]  # of this rank, as holders of a gradient
        gradients = dict(optimizer.averaged_gradients)
        if self._offloads:
            gradients = {i: [host.grad] for i, host in enumerate(self._host_copies())}
        for index, pieces in gradients.items():
            place = optimizer.sub_group_to_group_id[index] if self._stage == 3 else index
            slices[place] += [SimpleNamespace(grad=piece) for piece in pieces]
        return slices

    def _host_copies(self) -> Sequence[Tensor]:
        """Return the float32 copies of this rank's parameters on the host, with gradients."""
        names = {3: "fp32_partitioned_groups_flat"}
        name = names.get(self._stage, "single_partition_of_fp32_groups")
        return list(getattr(self._engine.optimizer, name))

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        if self._stage == 0:
            return torch.nn.utils.get_total_norm(gradients)
        return self.group.norm(gradients)

    def discard(self) -> None:
        """Clear the gradients as DeepSpeed does after an overflow; after a step none are left."""
        optimizer = self._engine.optimizer
        for host in self._host_copies() if self._offloads else ():
            if host.grad is not None:
                host.grad.zero_()
        if self._stage == 3:
            optimizer.zero_grad()
            optimizer.averaged_gradients = {}
            # The first backward of a window copies into these slices, later ones add: a parameter
            # that only a later one uses would be added to the window before.
            optimizer.grad_partitions_flat_buffer.zero_()
        elif self._stage > 0:
            optimizer.zero_grad()
            optimizer.micro_step_id = -1
            for index in optimizer.averaged_gradients:
                optimizer.averaged_gradients[index] = None
                optimizer.all_grad_tensors[index] = None

    def restore(self) -> None:
        """Let the engine count its own accumulation steps again."""
        self._engine.set_gradient_accumulation_boundary(None)


@contextmanager
def _without_own_clipping(engine: Any) -> Iterator[None]:
    """Switch the engine's clipping off: the window has clipped the normalised gradients."""
    if engine.zero_optimization_stage() == 0:
        engine.gradient_clipping = lambda: 0.0  # in place of the method
        try:
            yield
        finally:
            del engine.gradient_clipping
        return
    before, engine.optimizer.clip_grad = engine.optimizer.clip_grad, 0.0
    try:
        yield
    finally:
        engine.optimizer.clip_grad = before


def _groups(engine: Any) -> list[list[nn.Parameter]]:
    """Return the model's trainable parameters, in the groups of the user's optimizer."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return [
            [p for p in group["params"] if p.requires_grad]
            for group in engine.basic_optimizer.param_groups
        ]
    if stage < 3:
        return [list(group) for group in optimizer.bit16_groups]
    groups: list[list[nn.Parameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for index, sub_group in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[index]] += sub_group
    return groups


def _check(engine: Any) -> None:
    """Refuse settings that are not shown to be exact, by their name."""
    stage, is_bf16 = engine.zero_optimization_stage(), engine.bfloat16_enabled()
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    clash = {
        "pipeline parallelism (PipelineModule)": getattr(engine, "pipeline_parallelism", False),
        "fp16": engine.fp16_enabled(),
        f"bf16 and ZeRO {stage}": is_bf16 and stage < 2,
        'bf16 without "data_types": {"grad_accum_dtype": "fp32"}': (
            is_bf16 and engine.get_data_types()[1] is not torch.float32
        ),
        "torch_autocast": engine.torch_autocast_enabled(),
        'a "communication_data_type" that is not "fp32"': (
            engine.communication_data_type is not torch.float32
        ),
        "offload to nvme": any("nvme" in str(place and place.device) for place in offloads),
        "offload_param without offload_optimizer": _is_on(offloads[1]) and not _is_on(offloads[0]),
        "overlap_comm beside ZeRO 1": stage == 1 and engine.zero_overlap_comm(),
        "zero_quantized_gradients": engine.zero_quantized_gradients(),
        "zero_quantized_weights": engine.zero_quantized_weights(),
        "zenflow": engine.zenflow_config() is not None,
        "mixture-of-experts layers": engine.has_moe_layers,
        "sparse embeddings": any(
            getattr(m, "sparse", False) is True for m in engine.module.modules()
        ),
        "deepcompile": engine.is_deepcompile_enabled(),
        "managed_gradient_accumulation=false": not engine.managed_gradient_accumulation(),
        f"{type(engine.basic_optimizer).__name__}, which communicates on its own,": (
            not engine.enable_backward_allreduce
        ),
        "tensor, sequence or other model parallelism": (
            engine.dp_world_size != dist.get_world_size()
        ),
    }
    if engine.optimizer is None or engine.basic_optimizer is None:
        raise UnsupportedError("a DeepSpeed engine without an optimizer has nothing to step")
    for name, is_on in clash.items():
        if is_on:
            raise UnsupportedError(
                f"a DeepSpeed engine with {name}: not tested to make the update of the undivided "
                "batch; supported are ZeRO 0 to 3 in float32, ZeRO 2 and 3 in bf16 with gradients "
                "that are added and sent in fp32, and offload_optimizer on the CPU"
            )


def _is_on(setting: Any) -> bool:
    return setting is not None and str(getattr(setting.device, "value", setting.device)) != "none"
