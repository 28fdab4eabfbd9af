"""The engines of `--parallel`: DDP and FSDP2, DeepSpeed (ZeRO 0 to 3), and a pipeline of stages.

DeepSpeed writes the state of model and optimizer itself, every rank its part. A pipeline's
checkpoints are those of one process, so that a run may go on in one, under DDP, or in another
number of stages. A recipe says in `stages(model)` which modules run one after the other; an
`nn.Sequential` says it by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from wholebatch import WholeBatch
from wholebatch.batch import to_device
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.recipes.recipe import Recipe
from wholebatch.cli.run_settings import Config
from wholebatch.distributed.pipeline import Pipeline
from wholebatch.errors import MissingExtraError, OptionError, RecipeError, StateError
from wholebatch.options import Close, Memory
from wholebatch.safe_loading import load_tensors
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.window import Step


def train_with(
    recipe: Recipe, config: Config, world: World, model: nn.Module
) -> tuple[torch.optim.Optimizer, WholeBatch | Staged, Zero | Staged | None, Any]:
    """Return the optimizer, what makes the updates, the engine that keeps their state, schedulers.

    The model is whole on one process, or spread over the ranks as `world.parallel` says. The engine
    is None where model and optimizer have their state themselves.
    """
    if world.parallel == "pipeline":
        if config.grows:
            raise OptionError(
                f"--batch-size {config.batch_schedule} with --parallel pipeline: its stages do not "
                "measure the gradient noise; give a size or a schedule"
            )
        if config.optimizer_state != "device":
            raise OptionError(
                "--optimizer-state host with --parallel pipeline: its stages step their own "
                "optimizers; leave it out, or use --parallel ddp"
            )
        parts = stage_parts(recipe, config, world, model)
        optimizer = recipe.build_optimizer(parts, lr=config.lr)
        staged = Staged(recipe, config, world, model, parts, optimizer)
        return optimizer, staged, staged, None
    zero = None
    given: nn.Module
    if world.parallel == "deepspeed":
        optimizer = recipe.build_optimizer(model, lr=config.lr)
        zero = Zero(model, optimizer, config, world)
        spread, stepped = zero.engine, zero.engine.optimizer
        given = spread  # graphs and gathered parameters are the engine's
    else:
        spread = world.spread(model)
        optimizer = stepped = recipe.build_optimizer(model, lr=config.lr)
        given = model  # not DDP around it: the window reduces the gradients itself

    def loss(called: nn.Module, micro: Any) -> Any:
        return recipe.loss(given if called is spread else called, micro)

    scheduler = recipe.build_scheduler(optimizer, steps=config.horizon)
    train = WholeBatch(
        spread,
        stepped,
        loss=loss,
        units=recipe.units,
        audit=recipe.audit,
        micro_batch=micro_batch_of(recipe, config),
        precision=config.autocast,  # type: ignore[arg-type]
        clip_norm=config.clip_norm,
        batchnorm=config.batchnorm,  # type: ignore[arg-type]
        memory=Memory(config.budget, optimizer_state=config.optimizer_state),  # type: ignore[arg-type]
        execute=config.execute,  # type: ignore[arg-type]
        close=Close(
            sync=config.sync,  # type: ignore[arg-type]
        ),
        scheduler=scheduler,
    )
    why: str | None = "the batch follows the noise; leave out --noise off"
    if config.noise != "off":
        why = train.measure_noise(config.noise)  # type: ignore[arg-type]
    if config.grows and why:
        raise OptionError(f"--batch-size {config.batch_schedule}: {why}")
    return optimizer, train, zero, scheduler


def move(model: nn.Module, config: Config, world: World) -> None:
    """Move the model to its precision and device; a pipeline moves only its stages."""
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    if world.parallel == "pipeline":
        return
    try:
        model.to(world.device)
    except (RuntimeError, NotImplementedError) as error:
        raise RecipeError(
            f"the recipe's model cannot be moved to {world.device}: {error}"
        ) from error


def micro_batch_of(recipe: Recipe, config: Config) -> Any:
    """Return the split of a batch: a number of samples, a budget of tokens, or "auto"."""
    return config.micro_batch if config.tokens is None else recipe.build_tokens(config.tokens)


class Zero:
    """A DeepSpeed engine around a model, and how it is saved."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World
    ) -> None:
        if world.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        try:
            import deepspeed  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise MissingExtraError("deepspeed", "deepspeed", "--parallel deepspeed") from error
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # counted by the window, not by the engine
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": config.zero},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,
                "steps_per_print": 2**31,
            },
        )
        self.about = {"name": "deepspeed", "zero": config.zero, "ranks": world.ranks}

    def write(self, folder: Path) -> None:
        """Write the state of this rank into a folder; all ranks call it."""
        self.engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    def load(self, path: Path) -> None:
        """Load this rank's state from the folder that all ranks have written."""
        with _loads_without_code(self.engine):
            loaded, _ = self.engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise StateError(f"{path}: DeepSpeed finds no state of this rank in it")


def _loads_without_code(engine: Any) -> AbstractContextManager[None]:
    """Let DeepSpeed read its files as we read ours: it would run whatever their pickles ask for."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # type: ignore[import-untyped, unused-ignore]
    from deepspeed.runtime.zero.config import ZeroStageEnum  # type: ignore[import-untyped, unused-ignore]
    from deepspeed.utils.tensor_fragment import fragment_address  # type: ignore[import-untyped, unused-ignore]

    known = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)

    def load(path: str, map_location: object = None) -> Any:
        return load_tensors(Path(path), also=known)

    return replaced_attributes(engine.checkpoint_engine, load=load)


_FORMAT = 1


class Staged(Pipeline):
    """`wb.Pipeline` with the face of `WholeBatch`, as far as the command looks at it."""

    recoveries = 0
    noise = None
    about: ClassVar[dict[str, Any]] = {"name": "pipeline"}

    def __init__(
        self,
        recipe: Recipe,
        config: Config,
        world: World,
        model: nn.Module,
        parts: nn.ModuleList,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        assert isinstance(config.micro_batch, int)
        self.recipe, self.world, self.model = recipe, world, model
        self.parts, self.optimizer = parts, optimizer
        self.micro_batch = self.micro_batch_size = config.micro_batch
        self._order = recipe.build_optimizer(model, lr=config.lr)
        count = len(parts) * world.ranks
        stages = [
            PipelineStage(part, world.rank + place * world.ranks, count, world.device)
            for place, part in enumerate(parts)
        ]
        super().__init__(
            stages if len(stages) > 1 else stages[0],
            optimizer,
            # The last stage's output is known: a model that returns it stands for the recipe's.
            loss=lambda output, micro: recipe.loss(_KnownOutput(output), micro),
            micro_batch=config.micro_batch,
            schedule=config.schedule,  # type: ignore[arg-type]
            clip_norm=config.clip_norm,
            scheduler=recipe.build_scheduler(optimizer, steps=config.horizon),
        )

    def choose(self, batch: Any) -> str | None:
        """Choose nothing: the micro-batch was given."""
        return None

    def step(self, batch: Any) -> Step:  # type: ignore[override]
        """Make one update from the whole batch, which every rank has."""
        return super().step(*self._inputs(batch), target=batch)

    def join(self, like: Any) -> Step:
        raise AssertionError("every rank of a pipeline has every batch")

    def _inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the inputs that the recipe's loss gives to its model."""
        listener = _Listener()
        try:
            self.recipe.loss(listener, batch)
        except _Heard as heard:
            if not heard.inputs or not all(isinstance(one, Tensor) for one in heard.inputs):
                raise RecipeError(
                    f"--parallel pipeline: {self.recipe.path}: loss() must call model(...) with "
                    "tensors, by place and not by name"
                ) from None
            return heard.inputs
        raise RecipeError(
            f"--parallel pipeline: {self.recipe.path}: loss() never calls model(...), so what "
            "goes into the first stage is not known"
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as `WholeBatch` has it: another engine may go on from there."""
        absent = dict.fromkeys(("window", "scaler", "ema", "sizing", "most", "batchnorm"))
        zeros = {"done": 0, "of": 0, "rest": [], "draws": (False, None), "first_number": 0}
        return {**super().state_dict(), "format": _FORMAT, "kind": "WholeBatch", **absent, **zeros}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.get("format") != _FORMAT or saved.get("kind") != "WholeBatch":
            raise StateError("this is not the state of a run of wholebatch train")
        super().load_state_dict({**saved, "kind": "Pipeline"})

    def gathered(self) -> dict[str, Any]:
        """Return model and optimizer of all stages, as one process would have them."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        names |= {id(b): name for name, b in self.model.named_buffers()}
        tensors = (*self.parts.parameters(), *self.parts.buffers())
        place = self._places()
        own: dict[str, dict[Any, Any]] = {
            "model": {names[id(t)]: t.detach().cpu() for t in tensors if id(t) in names},
            "state": {
                place[id(parameter)]: to_device(dict(state), "cpu")
                for parameter, state in self.optimizer.state.items()
            },
        }
        model = {name: value.cpu() for name, value in self.model.state_dict().items()}
        state: dict[int, Any] = {}
        for one in self.world.gathered(own):
            model.update(one["model"])
            state.update(one["state"])
        saved = self._order.state_dict()
        mine = self.optimizer.state_dict()["param_groups"]
        groups = [
            {**now, "params": group["params"]}
            for group, now in zip(saved["param_groups"], mine, strict=True)
        ]
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}}

    def load(self, state: dict[str, Any]) -> None:
        """Take this rank's stages out of the state of one process."""
        self.model.load_state_dict(state["model"])
        saved, place = state["optimizer"], self._places()
        groups = self.optimizer.param_groups
        if len(groups) != len(saved["param_groups"]):
            raise StateError(
                f"the optimizer has {len(groups)} parameter groups here and "
                f"{len(saved['param_groups'])} in the checkpoint"
            )
        ordered = [p for group in groups for p in group["params"]]
        kept = {
            index: saved["state"][place[id(parameter)]]
            for index, parameter in enumerate(ordered)
            if place[id(parameter)] in saved["state"]
        }
        packed = self.optimizer.state_dict()["param_groups"]
        options = [
            {**there, "params": here["params"]}
            for here, there in zip(packed, saved["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": kept, "param_groups": options})

    def _places(self) -> dict[int, int]:
        """Return the number of each parameter in the optimizer of one process."""
        ordered = [p for group in self._order.param_groups for p in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(ordered)}


def stage_parts(recipe: Recipe, config: Config, world: World, model: nn.Module) -> nn.ModuleList:
    """Return this rank's stages, on its device; an error says why a recipe cannot be cut."""
    if not isinstance(config.micro_batch, int):
        raise OptionError(
            f"--micro-batch {config.micro_batch} with --parallel pipeline: its schedules need a "
            "number of samples; give one"
        )
    for flag, value, plain in (
        ("precision", config.precision, "full"),
        ("memory", config.memory, None),
    ):
        if value != plain:
            raise OptionError(f"--{flag} {value} with --parallel pipeline: leave it out")
    per_rank = 2 if config.schedule == "interleaved" else 1
    count = per_rank * world.ranks
    stages = cut(recipe.build_stages(model), count)
    if len(stages) < count:
        raise RecipeError(
            f"--parallel pipeline: {recipe.path}: its {len(stages)} modules with parameters do "
            f"not make {count} stages ({per_rank} on each of {world.ranks} ranks); start fewer "
            "ranks"
        )
    owners: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise RecipeError(
                    f"--parallel pipeline: {recipe.path}: {name} is in stage "
                    f"{owners[id(parameter)] + 1} and in stage {number + 1}; untie it, or use ddp"
                )
    mine = stages[world.rank :: world.ranks]
    return nn.ModuleList(mine).to(world.device)


def cut(modules: Sequence[nn.Module], count: int) -> list[nn.Sequential]:
    """Cut modules that run in turn into `count` stages whose largest is as small as can be.

    >>> [len(stage) for stage in cut([nn.Linear(4, 4) for _ in range(5)], 2)]
    [3, 2]
    """
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    pieces: list[list[nn.Module]] = []
    weights: list[int] = []
    for module, size in zip(modules, sizes, strict=True):
        if pieces and (size == 0 or weights[-1] == 0):  # nothing to train: goes with a neighbour
            pieces[-1].append(module)
            weights[-1] += size
        else:
            pieces.append([module])
            weights.append(size)
    count = min(count, len(pieces))

    @cache
    def best(n: int, k: int) -> tuple[int, int]:
        """Return the smallest largest stage of the first n pieces in k stages, and its last cut."""
        if k == 1:
            return sum(weights[:n]), 0
        return min((max(best(at, k - 1)[0], sum(weights[at:n])), -at) for at in range(k - 1, n))

    stages: list[nn.Sequential] = []
    n = len(pieces)
    for k in range(count, 0, -1):
        before = -best(n, k)[1]
        stages.append(nn.Sequential(*(one for piece in pieces[before:n] for one in piece)))
        n = before
    return stages[::-1]


class _Heard(Exception):
    """Carries what a model was called with."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__("called")
        self.inputs = inputs


class _Listener(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        raise _Heard(() if named else inputs)


class _KnownOutput(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = [output]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._output[0]
