"""The model, optimizer and batches of a training run, and how they are saved and restored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from wholebatch import WholeBatch
from wholebatch.batch import split, to_device
from wholebatch.cli.batch_scaling import lr_factor
from wholebatch.cli.checkpoints import Loaded
from wholebatch.cli.parallel_ranks import World, copied
from wholebatch.cli.recipes.recipe import Recipe
from wholebatch.cli.recipes.recipe_batches import Batches, EmptyShare, seed_generators
from wholebatch.cli.run_settings import Config
from wholebatch.cli.updates_made import samples_seen
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    evaluation_mode,
    needs_whole_batch,
    uses_batch_statistics,
)
from wholebatch.errors import OptionError, StateError, UnsupportedError
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.activation_checkpointing import with_checkpoints
from wholebatch.options import Memory
from wholebatch.window import precision


@dataclass(eq=False)
class TrainingRun:
    """Everything that trains, with the settings that it was built from."""

    recipe: Recipe
    config: Config
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: WholeBatch
    batches: Batches

    @property
    def windows(self) -> int:
        """Windows closed so far, those without an update too."""
        return self.train.updates + self.train.skipped

    @property
    def is_undivided(self) -> bool:
        """True if BatchNorms train with the statistics of the batch, which then is not split."""
        return self.config.batchnorm == "exact" and needs_whole_batch(self.model)

    def choose(self) -> str | None:
        """Let "auto" choose its micro-batch before the first step; return the choice and why."""
        if self.train.micro_batch_size is not None or self.train.micro_batch != "auto":
            return None  # it was given, or chosen by the run that is resumed
        batch = self.batches.peek()
        return self.train.choose(batch.like if isinstance(batch, EmptyShare) else batch)

    @property
    def has_batchnorm(self) -> bool:
        """True if a BatchNorm of the model normalises by the batch."""
        return any(uses_batch_statistics(norm) for _, norm in batchnorms(self.model))

    def batchnorm_sees(self, samples: int, micro_batches: int) -> int | None:
        """Return the samples that a BatchNorm sees at a time; None if it sees the whole batch.

        `samples` are those of this rank's batch.
        """
        parts = micro_batches > 1 or self.world.ranks > 1
        if self.config.batchnorm != "allow" or not parts or not self.has_batchnorm:
            return None
        size = self.train.micro_batch_size
        return samples_seen(samples, micro_batches=micro_batches, micro_batch=size)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything to resume from. All ranks call it: each has progress of its own."""
        progress, device = self.train.state_dict(), self.world.device
        random = progress["random"] = dict(progress["random"])
        if "cuda" in random:
            random["cuda"] = [random["cuda"][device.index or 0]]
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.batches.state_dict(),
            "ranks": self.world.gathered(progress),
        }

    def restore(self, loaded: Loaded) -> None:
        """Resume from a checkpoint; raise a StateError if it does not belong to this recipe."""
        state, path = loaded.state, loaded.path
        missing = {"model", "optimizer", "data", "ranks"} - state.keys()
        if missing:
            raise StateError(f"{path} is damaged: it has no {', '.join(sorted(missing))}")
        for part, name in ((self.model, "model"), (self.optimizer, "optimizer")):
            try:
                part.load_state_dict(state[name])
            except (ValueError, KeyError, RuntimeError) as error:
                why = " ".join(str(error).split())
                raise StateError(f"{path} does not fit this recipe's {name}: {why}") from error
        _check_optimizer(self.optimizer, where=str(path))
        self.batches.load_state_dict(state["data"])
        self._restore_progress(state["ranks"])

    def _restore_progress(self, everyones: list[dict[str, Any]]) -> None:
        """Take up this rank's progress; a rank that was not there before is seeded anew."""
        rank, device = self.world.rank, self.world.device
        progress = dict(everyones[rank if rank < len(everyones) else 0])
        random = progress["random"] = dict(progress["random"])
        saved = random.pop("cuda", None)
        if saved is not None and torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state_all()
            random["cuda"][device.index or 0] = saved[0]
        self.train.load_state_dict(progress)
        if rank >= len(everyones):
            mixed = (self.config.seed * 1_000_003 + rank) * 1_000_003 + self.windows
            seed_generators(mixed % 2**63)

    # ------------------------------------------------------------- validation

    def evaluate(self) -> float:
        """Return the mean loss over the units of all held-out samples, over all ranks.

        The batches are split as in training. The model is in evaluation mode. Its mode and all
        random numbers are as before afterwards.
        """
        config, world = self.config, self.world
        batches = self.recipe.build_batches(
            config.batch_size, seed=0, rank=world.rank, ranks=world.ranks, held_out=True
        )
        size = micro_batch_of(self.recipe, config)
        size = self.train.micro_batch_size or config.batch_size if size == "auto" else size
        casts = precision.choose(config.autocast, world.device.type, keeps=False)
        sums: dict[str, tuple[float, float, float]] = {}
        with torch.random.fork_rng(), evaluation_mode(self.model), torch.no_grad():
            while (batch := batches.peek()) is not None and batches.position.epoch == 0:
                is_empty = isinstance(batch, EmptyShare)
                micros = split(batch.like if is_empty else batch, size)
                for micro in micros:
                    with casts.forward():
                        loss = as_loss(self.recipe.loss(self.model, to_device(micro, world.device)))
                    for name, part in terms_of(loss).items():
                        total, units, _ = sums.get(name, (0.0, 0.0, 1.0))
                        if not is_empty:
                            total, units = total + float(part.total), units + float(part.units)
                        sums[name] = total, units, part.weight
                batches.take()
        everyones = world.gathered(sums)
        return sum(
            weight * sum(of[name][0] for of in everyones) / sum(of[name][1] for of in everyones)
            for name, (_, _, weight) in everyones[0].items()
        )


def build_run(
    recipe: Recipe, config: Config, world: World, *, schedule_updates: int
) -> TrainingRun:
    """Build the parts of the recipe, from the seed on the same every time, on every rank.

    `schedule_updates` is the number of updates that the learning-rate schedule is made for.
    """
    if config.steps is not None:
        config = replace(config, batch_size=int(config.micro_batch) * world.ranks)
    seed_generators(config.seed)
    batches = recipe.build_batches(
        config.batch_size,
        seed=config.seed,
        rank=world.rank,
        ranks=world.ranks,
        times=config.steps_at,
    )
    config = fitted_to(config, batches)
    if config.validate is not None and not recipe.has_validation:
        raise UnsupportedError(
            f"--validate {config.validate}: {recipe.path} has no validation(); define it to return "
            "the held-out samples, as data() returns the training samples"
        )
    model = _built(recipe, config).to(world.device)
    spread = copied(model)
    optimizer = recipe.build_optimizer(model, lr=config.lr)
    for group in optimizer.param_groups:
        group["lr"] *= rate_factor(recipe, config, 0)

    def loss(called: nn.Module, micro: Any) -> Any:
        # The recipe's own module, not DDP around it: the window reduces the gradients itself.
        return recipe.loss(model if called is spread else called, micro)

    train = WholeBatch(
        spread,
        optimizer,
        loss=loss,
        units=recipe.units,
        audit=recipe.audit,
        micro_batch=micro_batch_of(recipe, config),
        precision=config.autocast,  # type: ignore[arg-type]
        clip_norm=config.clip_norm,
        batchnorm=config.batchnorm,  # type: ignore[arg-type]
        memory=Memory(config.budget, config.optimizer_state),  # type: ignore[arg-type]
        execute=config.execute,  # type: ignore[arg-type]
        scheduler=_scheduler(recipe, config, optimizer, schedule_updates),
    )
    if world.rank:  # dropout of its own on every rank
        seed_generators(config.seed + world.rank)
    return TrainingRun(recipe, config, world, model, optimizer, train, batches)


def _scheduler(
    recipe: Recipe, config: Config, optimizer: torch.optim.Optimizer, updates: int
) -> Any:
    """Return the recipe's scheduler, or one for `--warmup`, and for `--lr-rule` with `--steps`."""
    own = recipe.build_scheduler(optimizer, updates=updates)
    grows = config.steps is not None and config.lr_rule != "none"
    if config.warmup is None and not grows:
        return own
    if own is not None:
        option = f"--warmup {config.warmup}" if config.warmup else "--lr-rule with --steps"
        raise OptionError(
            f"{option}: {recipe.path} has a scheduler(), which sets the rate; do it there"
        )
    begins, total = rate_factor(recipe, config, 0), config.warmup or 1

    def factor(update: int) -> float:
        return min(1.0, (update + 1) / total) * rate_factor(recipe, config, update) / begins

    return LambdaLR(optimizer, factor)


def rate_factor(recipe: Recipe, config: Config, update: int) -> float:
    """Return the factor that `--lr-rule` gives the recipe's rate at an update."""
    base = config.base_batch(recipe.batch_size)
    size, rule = config.batch_size * config.steps_at(update), config.lr_rule.partition(":")[0]
    return lr_factor(base_batch=base, batch=size, rule=rule)


def _built(recipe: Recipe, config: Config) -> nn.Module:
    model = recipe.build_model()
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    if config.checkpointing:
        try:
            with_checkpoints(model)
        except UnsupportedError as error:
            raise OptionError(f"--checkpointing: {error}") from error
    return model


def micro_batch_of(recipe: Recipe, config: Config) -> Any:
    """Return the split of a batch: a number of samples, a budget of tokens, or "auto"."""
    return config.micro_batch if config.tokens is None else recipe.build_tokens(config.tokens)


def fitted_to(config: Config, batches: Batches) -> Config:
    """Return the settings with the batch size that the data really has."""
    if batches.kind == "loader":
        if config.steps is not None:
            raise OptionError(
                f"--steps {config.steps}: the recipe's data() is a DataLoader, whose batches are "
                "used as they are; return its dataset"
            )
        size = batches.loader_batch_size
        if size is None:  # the loader makes batches of its own: each is taken whole
            return config
        config = replace(config, batch_size=size)
    elif batches.length is not None and config.batch_size > batches.length:
        default = " (the default)" if config.batch_size == Config.batch_size else ""
        raise OptionError(
            f"--batch-size {config.batch_size}{default}: is more than the {batches.length:,} "
            f"samples that the recipe's data() has; pass --batch-size {batches.length} or less"
        )
    if isinstance(config.micro_batch, int) and config.micro_batch > config.batch_size:
        raise OptionError(
            f"--micro-batch {config.micro_batch}: is more than the batch of {config.batch_size}; "
            'give at most that, or "auto"'
        )
    return config


def _check_optimizer(optimizer: torch.optim.Optimizer, *, where: str) -> None:
    """Refuse the state of another kind of optimizer, which torch loads without a warning."""
    absent = [
        name
        for name in optimizer.defaults
        if name != "differentiable"  # torch adds it to the defaults of every optimizer it loads
        and any(name not in group for group in optimizer.param_groups)
    ]
    if absent:
        raise StateError(
            f"{where} is of another optimizer: {', '.join(absent)} of {type(optimizer).__name__} "
            "are not there; resume with the optimizer that it was made with"
        )
