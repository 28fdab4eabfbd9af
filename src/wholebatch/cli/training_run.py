"""A training run put together from its recipe and settings: `build` makes a `Session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wholebatch import WholeBatch
from wholebatch.batch import batch_size_of, split
from wholebatch.cli.loss_spikes import LossSpikes
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.recipes.recipe import Recipe
from wholebatch.cli.recipes.recipe_batches import Batches, Nothing, Position, reseed
from wholebatch.cli.run_settings import Config
from wholebatch.cli.training_engines import Staged, Zero, micro_batch_of, move, train_with
from wholebatch.coupled import batchnorms
from wholebatch.errors import OptionError, UnsupportedError, WholebatchError
from wholebatch.memory.activation_checkpointing import with_checkpoints
from wholebatch.memory.budget import parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.memory.make_it_fit import Rung, ladder, refusal
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.predict import predict_peak
from wholebatch.memory.trial_step import held_bytes
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.batch_scaling import (
    Arithmetic,
    AutoBatch,
    BatchSchedule,
    Follow,
    parse_amount,
    parse_auto,
)
from wholebatch.window.noise_scale import NoiseScale
from wholebatch.window.window import Step

# Windows, whatever they were: the meter is slow. Plain SGD never has a state, and batches may all
# be short.
_ENOUGH = 4


@dataclass(eq=False)
class PeakMemory:
    """Measures a run: CUDA's allocator keeps its own peak, on the CPU a few windows are metered.

    Metered until one whole window after the first was, with the optimizer's state there already:
    the first makes that state at its end, and so shows less than all later ones use. One of a full
    batch, if it comes soon: the last one of an epoch may be short.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    measured: int | None = None
    """The most bytes of tensors alive at one moment; None where nothing can tell."""
    _is_first: bool = True
    _metered: int = 0

    def __post_init__(self) -> None:
        self.settled = self.device.type != "cpu"
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def around(self, *, full_batch: bool = True) -> Iterator[None]:
        """Measure one window."""
        if self.settled:
            yield
            if self.device.type == "cuda":  # a micro-batch that may grow starts it anew
                self.measured = max(
                    self.measured or 0, torch.cuda.max_memory_allocated(self.device)
                )
            return
        has_state = bool(self.optimizer.state)
        with MemoryMeter(model=self.model, optimizer=self.optimizer) as meter:
            yield
        self._metered += 1
        # A run's first window begins with a look at the model, which may take more than a step.
        before = 0 if self._metered <= 2 or self.measured is None else self.measured
        self.measured = max(meter.peak, before)
        self._is_first = not has_state
        is_usual = has_state and full_batch and self._metered > 1
        self.settled = is_usual or self._metered >= _ENOUGH

    def text(self, loss: Callable[[Any, Any], Any], batch: Any, *, precision: str) -> str:
        """Return both numbers in one line; `batch` is a whole one."""
        measured = self.measured
        here = "not measured on this device" if measured is None else f"{bytes_said(measured)}"
        try:
            whole = predict_peak(
                self.model,
                loss,
                batch,
                optimizer=self.optimizer,
                precision=precision,
                micro_batches=1,
                first=self._is_first and self.device.type == "cpu",
            ).peak
        except WholebatchError as error:
            return f"{here}; for the whole batch at once: {error}"
        except Exception as error:  # a loss that cannot run without numbers
            reason = str(error).strip().split("\n")[0][:120]
            return f"{here}; for the whole batch at once it cannot be predicted ({reason})"
        less = f" ({whole / measured:.1f}×)" if measured else ""
        return f"{here} measured; {bytes_said(whole)} predicted for the whole batch at once{less}"


@dataclass
class Session:
    """Everything that trains, with the settings that it was built from."""

    recipe: Recipe
    config: Config
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: WholeBatch | Staged
    memory: PeakMemory
    batches: Batches
    position: Position  # of the batch that the open or next window is made from
    pace: Pace
    fitted: str | None = None  # what --fit has applied
    engine: Zero | Staged | None = None
    spikes: LossSpikes = field(default_factory=LossSpikes)

    @property
    def windows(self) -> int:
        """Windows closed so far, those without an update too."""
        return self.train.updates + self.train.skipped

    @property
    def progress(self) -> int:
        """Updates made so far; with a batch that grows, the data in updates of the first size."""
        return self.train.updates if self.pace.auto is None else self.pace.auto.done

    def choose(self) -> str | None:
        """Let "auto" choose its micro-batch before the first step; return the choice and why."""
        chosen = None
        # Else it was given, or chosen by the run that is resumed.
        if self.train.micro_batch_size is None and self.train.micro_batch == "auto":
            batch = self.batches.peek()
            chosen = self.train.choose(batch.like if isinstance(batch, Nothing) else batch)
        self._check_growth()
        return chosen

    def _check_growth(self) -> None:
        """Refuse a batch that would never grow: its noise shows between two micro-batches."""
        auto, size = self.pace.auto, self.train.micro_batch_size
        if auto is None or size is None or (self.world.shares > 1 and not self.world.is_sharded):
            return
        if Arithmetic(auto.first, size, self.world.shares).steps == 1:
            most = max(1, auto.first // (2 * self.world.shares))
            raise OptionError(
                f"--batch-size {self.config.batch_schedule}: a batch of {auto.first} in one "
                "micro-batch does not show its gradient noise; give --micro-batch "
                f"{most}, or a larger first batch"
            )

    def micro_batches(self) -> list[list[int]] | None:
        """Return the samples in each micro-batch of a full batch, by rank; None if unknown."""
        by, ranks = self.config.micro_batch, self.world.shares
        if by == "auto":
            by = self.train.micro_batch_size or by
        if isinstance(by, int) and self.batches.kind != "loader":
            return [*map(list, Arithmetic(self.config.batch_size, by, ranks).micro_batches)]
        if by == "auto":
            return None
        batch = self.batches.peek()
        how = by if isinstance(by, int) else micro_batch_of(self.recipe, self.config)
        mine = [] if isinstance(batch, Nothing) else split(batch, how)
        return self.world.gathered([batch_size_of(micro) for micro in mine])


def build(
    recipe: Recipe,
    config: Config,
    world: World,
    *,
    fits: bool = False,
    keeps_precision: bool = False,
) -> Session:
    """Build the parts of the recipe, from the seed on the same every time, on every rank.

    `fits`: let the model fit the memory, by what `--fit` may apply.
    """
    seed_generators(config.seed)
    batches = recipe.build_batches(
        config.batch_size,
        seed=config.seed,
        rank=world.share,
        ranks=world.shares,
        workers=config.workers,
    )
    config = paced(fitted_to(config, batches), recipe, batches)
    model = recipe.build_model()
    _check_last_batch(model, config, batches, world)
    move(model, config, world)
    fitted = None
    if fits:
        config, fitted = fit_in(
            recipe, config, model, batches, world, keeps_precision=keeps_precision
        )
    if config.checkpointing:
        apply_checkpointing(model)
    optimizer, train, engine, scheduler = train_with(recipe, config, world, model)
    memory = PeakMemory(model, optimizer, device=world.device)
    # The meter knows whole tensors only.
    memory.settled = memory.settled or world.parallel != "ddp"
    if world.rank:  # dropout of its own on every rank
        seed_generators(config.seed + world.rank)
    pace = Pace(config, batches=batches, optimizer=optimizer, train=train, scheduler=scheduler)
    parts = (recipe, config, world, model, optimizer, train, memory, batches, batches.position)
    return Session(*parts, pace, fitted, engine)


def fitted_to(config: Config, batches: Batches) -> Config:
    """Return the settings with the batch size that the data really has."""
    if batches.kind == "loader":
        size = batches.loader_batch_size
        if size is None:  # batches of the loader's own making: each is taken whole
            return config
        config = replace(config, batch_size=size)
    elif batches.length is not None and config.batch_size > batches.length:
        raise OptionError(
            f"--batch-size {config.batch_size}: is more than the {batches.length:,} samples that "
            "the recipe's data() has"
        )
    if isinstance(config.micro_batch, int) and config.micro_batch > config.batch_size:
        raise OptionError(
            f"--micro-batch {config.micro_batch}: is more than the batch of {config.batch_size}; "
            'give at most that, or "auto"'
        )
    return config


def _check_last_batch(model: nn.Module, config: Config, batches: Batches, world: World) -> None:
    """Refuse a batch without a sample for every rank: exact BatchNorm needs one on each."""
    if batches.length is None or config.batchnorm != "exact" or not batchnorms(model):
        return
    for size in (config.batch_size, batches.length % config.batch_size):
        if 0 < size < world.shares:
            raise OptionError(
                f"--batch-size {config.batch_size}: a batch of an epoch has {size} samples for "
                f"{world.shares} ranks, and exact BatchNorm needs one on every rank; choose another"
            )


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (on all devices), Python and, if imported, NumPy."""
    torch.manual_seed(seed)
    reseed(seed)


_REFUSED = -1


def fit_in(
    recipe: Recipe,
    config: Config,
    model: nn.Module,
    batches: Batches,
    world: World,
    *,
    keeps_precision: bool,
) -> tuple[Config, str]:
    """Return settings with which one sample fits on every rank, and a line on what was applied.

    Mixed precision first (unless the user has named one), then checkpointing as well, then the
    optimizer's state on the host: each makes the update of the whole batch. The model's
    blocks are checkpointed by `apply_checkpointing`, as in a run that is resumed.
    """
    assert config.budget is not None
    chosen = _REFUSED
    rungs: list[Rung] = []
    problem: WholebatchError | None = None
    try:
        budget = parse_memory(
            config.budget,
            device=world.device,
            held=held_bytes(model),
            processes=sharing_processes(world.device, world.ranks),
        )
        batch = batches.peek()
        rungs = ladder(
            model,
            recipe.loss,
            resize_batch(batch.like if isinstance(batch, Nothing) else batch, 1),
            budget=budget,
            optimizer=recipe.build_optimizer(model, lr=config.lr),
            precision=config.autocast,
            lowers=not keeps_precision and config.precision != "bf16-pure",
        )
        own = (place for place, rung in enumerate(rungs) if rung.fits)
        if world.parallel != "ddp":  # engines that shard or cut a model keep its state
            own = (place for place in own if rungs[place].optimizer_state == "device")
        chosen = next(own, _REFUSED)
        if chosen == _REFUSED:
            problem = OptionError(f"--fit: {refusal(rungs, budget)}")
    except WholebatchError as error:
        problem = error
    everyones = world.gathered(chosen)
    if problem is not None:
        raise problem
    if _REFUSED in everyones:
        raise OptionError("--fit: the model does not fit the memory of another rank")
    chosen = max(everyones)
    config = _with_rung(config, rungs[chosen])
    if not chosen:
        return config, "nothing was needed: one sample fits as it is"
    before, after = bytes_said(rungs[0].peak), bytes_said(rungs[chosen].peak)
    return config, f"applied {rungs[chosen].what}: one sample needs {after} instead of {before}"


def _with_rung(config: Config, rung: Rung) -> Config:
    is_pure = config.precision == "bf16-pure"  # runs without autocast, and keeps its name
    return replace(
        config,
        precision=config.precision if is_pure else rung.precision,
        checkpointing=rung.checkpoints,
        optimizer_state="host" if rung.optimizer_state == "host" else config.optimizer_state,
    )


def apply_checkpointing(model: nn.Module) -> None:
    """Let the model's repeated blocks keep only their inputs."""
    try:
        with_checkpoints(model)
    except UnsupportedError as error:
        raise OptionError(f"--checkpointing: {error}") from error


def paced(config: Config, recipe: Recipe, batches: Batches) -> Config:
    """Return the settings with the base batch set; refuse what is impossible."""
    if config.batch_schedule is not None and batches.kind == "loader":
        raise OptionError(
            f"--batch-size {config.batch_schedule}: the recipe's DataLoader makes the batches; "
            "return the dataset from data() instead"
        )
    warmup = None if config.warmup is None else parse_amount(config.warmup)
    if warmup is not None and warmup.by == "epochs" and batches.length is None:
        raise OptionError(
            f"--warmup {config.warmup}: how long an epoch is, is not known before its end; give "
            "updates (500) or tokens (2Mtok)"
        )
    if config.base_batch is not None:
        return config
    if config.batch_schedule is not None and not config.grows:
        base = BatchSchedule.parse(config.batch_schedule).first
    elif batches.kind == "loader":
        base = config.batch_size
    else:
        base = recipe.defaults.get("batch_size", config.batch_size)
    return replace(config, base_batch=base)


class Pace:
    """Sets the size of every batch before it is read, and the rate before the update is made."""

    def __init__(
        self,
        config: Config,
        *,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        train: WholeBatch | Staged,
        scheduler: Any = None,
    ) -> None:
        self.tokens = 0.0  # units of all windows so far
        self._batches = batches
        self._train = train
        self._optimizer = optimizer
        self._scheduler = scheduler
        text = config.batch_schedule
        self.schedule: BatchSchedule | None = None
        self.auto: AutoBatch | None = None
        first, rule = None, config.lr_rule or "none"
        if text is not None and config.grows:
            limits = [size for size in (parse_auto(text)[1], batches.length) if size is not None]
            self.auto = AutoBatch(config.batch_size, min(limits, default=None))
            adaptive = all("betas" in group for group in optimizer.param_groups)
            first, rule = self.auto.first, config.lr_rule or ("sqrt" if adaptive else "linear")
        elif text is not None:
            self.schedule = BatchSchedule.parse(text)
            first = self.schedule.first
        self.rule = rule
        self._warmup = None if config.warmup is None else parse_amount(config.warmup)
        assert config.base_batch is not None
        self._follow = Follow(
            optimizer,
            base_batch=config.base_batch,
            rule=rule,
            betas=config.betas,
            weight_decay=config.weight_decay,
            first_batch=first,
        )
        if self.changes:
            batches.follow(self._size_at)

    @property
    def changes(self) -> bool:
        """True if the batch size may change during the run."""
        return self.auto is not None or self.schedule is not None

    def _size_at(self, epoch: int) -> int:
        if self.auto is not None:
            return self.auto.batch
        assert self.schedule is not None
        return self.schedule.at(update=self._train.updates, epoch=epoch, tokens=self.tokens)

    def begin(self, *, samples: int) -> list[float]:
        """Set the learning rates for the batch that was read last, and return them.

        `samples` of this epoch were taken before it.
        """
        size = self._batches.batch_size
        if self._batches.kind == "loader":
            size = self._follow.base_batch
        gain = 1.0 if self.auto is None else self.auto.gain
        self._follow.set(size, warmth=self._warmth(samples), gain=gain)
        return self._follow.rates()

    def end(self, step: Step, noise: NoiseScale | None) -> None:
        """Count a window; a batch that grows may be larger from the next one on.

        The learning-rate schedule goes by the data: a batch of four times the first size is four
        of its steps.
        """
        self.tokens += step.units
        if self.auto is None or step.skipped is not None:
            return
        self.auto.advance(self._scheduler)
        self.auto.after(step.units, noise, float(self._optimizer.param_groups[0]["lr"]))

    def _warmth(self, samples: int) -> float:
        if self._warmup is None or self._warmup.number == 0:
            return 1.0
        done: float
        if self._warmup.by == "epochs":
            assert self._batches.length is not None
            done = self._batches.position.epoch + samples / self._batches.length
        else:
            done = self._train.updates if self._warmup.by == "updates" else self.tokens
        return min(1.0, done / self._warmup.number)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the place in the data does not have."""
        auto = {} if self.auto is None else {"auto": self.auto.state_dict()}
        return {"tokens": self.tokens, **auto}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = float(state.get("tokens", 0.0))
        if self.auto is not None:
            self.auto.load_state_dict(state["auto"])
