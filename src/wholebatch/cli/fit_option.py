"""`--fit`: a model that does not fit the memory is made to, by the least that is needed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.recipes import Batches, Nothing, Recipe
from wholebatch.cli.run_settings import Config
from wholebatch.errors import OptionError, UnsupportedError, WholebatchError
from wholebatch.memory.activation_checkpointing import with_checkpoints
from wholebatch.memory.budget import bytes_said, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.memory.make_it_fit import Rung, ladder, refusal
from wholebatch.memory.trial_step import held_bytes

__all__ = ["apply_checkpointing", "fit_in"]

_REFUSED = -1


def fit_in(
    recipe: Recipe,
    config: Config,
    model: nn.Module,
    batches: Batches,
    crew: Crew,
    *,
    keeps_precision: bool,
) -> tuple[Config, str]:
    """Settings with which one sample fits on every rank, and a line that says what was applied.

    Mixed precision first (unless the user has named one), then checkpointing as well, then sums of
    the gradients on the host: each makes the update of the whole batch. The model's
    blocks are checkpointed by `apply_checkpointing`, as in a run that is resumed.
    """
    chosen = _REFUSED
    rungs: list[Rung] = []
    problem: WholebatchError | None = None
    try:
        rungs, budget = _rungs(recipe, config, model, batches, crew, lowers=not keeps_precision)
        own = (place for place, rung in enumerate(rungs) if rung.fits and rung.devices == 1)
        if crew.parallel != "ddp":  # engines that shard or cut a model move gradients themselves
            own = (place for place in own if rungs[place].gradients == "device")
        chosen = next(own, _REFUSED)
        if chosen == _REFUSED:
            problem = OptionError(f"--fit: {refusal(rungs, budget)}")
    except WholebatchError as error:
        problem = error
    everyones = crew.gathered(chosen)
    if problem is not None:
        raise problem
    if _REFUSED in everyones:
        raise OptionError("--fit: the model does not fit the memory of another rank")
    chosen = max(everyones)
    rung = rungs[chosen]
    said = "nothing was needed: one sample fits as it is"
    if chosen:
        before, after = bytes_said(rungs[0].peak), bytes_said(rung.peak)
        said = f"applied {rung.what}: one sample needs {after} instead of {before}"
    gradients = config.gradients if rung.gradients == "device" else rung.gradients
    return (
        replace(
            config,
            precision=rung.precision,
            checkpointing=rung.checkpoints,
            gradients=gradients,
        ),
        said,
    )


def apply_checkpointing(model: nn.Module) -> None:
    """Let the model's repeated blocks keep only their inputs."""
    try:
        with_checkpoints(model)
    except UnsupportedError as error:
        raise OptionError(f"--checkpointing: {error}") from error


def _rungs(
    recipe: Recipe,
    config: Config,
    model: nn.Module,
    batches: Batches,
    crew: Crew,
    *,
    lowers: bool,
) -> tuple[list[Rung], int]:
    assert config.budget is not None
    budget = parse_memory(
        config.budget,
        device=crew.device,
        held=held_bytes(model),
        processes=sharing_processes(crew.device, crew.ranks),
    )
    batch = batches.peek()
    whole = batch.like if isinstance(batch, Nothing) else batch
    rungs = ladder(
        model,
        recipe.loss,
        resize_batch(whole, 1),
        budget=budget,
        optimizer=recipe.build_optimizer(model, lr=config.lr),
        precision=config.autocast,
        lowers=lowers and config.precision != "bf16-pure",
    )
    # Pure 16-bit parameters run without autocast, and keep their name.
    kept = config.precision if config.precision == "bf16-pure" else None
    return [replace(rung, precision=kept or rung.precision) for rung in rungs], budget
