"""The options of `wholebatch train` and the settings of a run that come from them.

A setting comes from the command line, else from the file of `--from`, else from the stored run,
else from the recipe, else it is the default. Nothing here imports torch: a wrong option is refused
at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from wholebatch.cli.command_options import (
    choice,
    count_of,
    flag_of,
    must_be,
    one_of,
    option,
    positive_number,
    recipe_argument,
    switch,
    whole_number,
)
from wholebatch.errors import OptionError, StateError
from wholebatch.plain_files import load_json, read_json, reason
from wholebatch.tune.batch_scaling import BatchSchedule, parse_amount, parse_auto

PRECISIONS = ("full", "fp32", "bf16", "fp16", "fp8", "bf16-pure")
_TOKENS = re.compile(r"(\d+)\s*tokens?")
_BATCH, _RUN = "Batch and update", "Run"
# In every config.json; later settings have their default where they are absent.
_ALWAYS_STORED = {
    "batch_size", "micro_batch", "steps", "precision", "clip_norm", "lr", "seed",
    "checkpoint_every",
}  # fmt: skip

Given: TypeAlias = dict[str, Any]
"""The options that the user gave, by name."""


# --------------------------------------------------------------------- checks of single settings


def _word_or_count(value: Any, label: str, allowed: str, *words: str) -> int | str:
    text = str(value).strip()
    if text in words:
        return text
    with suppress(ValueError):
        return count_of(text)
    raise OptionError(f"{label} {text}: must be {allowed}")


def _micro_batch(value: Any, label: str) -> int | str:
    match = _TOKENS.fullmatch(str(value).strip())
    if match and int(match[1]) > 0:
        return f"{int(match[1])} tokens"
    allowed = '"auto", a number of samples, or a budget such as "4096 tokens"'
    return _word_or_count(value, label, allowed, "auto")


def _noise(value: Any, label: str) -> int | str:
    return _word_or_count(value, label, '"auto", "off", or every how many windows', "auto", "off")


def _schedule(value: Any, label: str) -> str:
    """Return a schedule of batch sizes, or "auto", as it is stored."""
    text = str(value)
    if not text.strip().startswith("auto"):
        return str(BatchSchedule.parse(text, label))
    parse_auto(text, label)
    return text.strip()


def _precision(value: Any, label: str) -> str:
    return "full" if one_of(*PRECISIONS)(value, label) == "fp32" else str(value)


def _memory(value: Any, label: str) -> str:
    text = str(value).strip()
    if text == "free" or re.fullmatch(r"\d+(\.\d+)?\s*([kKMGT]i?B|B|%)", text, re.IGNORECASE):
        return text
    with suppress(ValueError):
        if 0 < float(text) <= 1 and "." in text:
            return text
    raise OptionError(
        f"{label} {text}: must be a size such as 20GiB, a share of the device such as 0.8 or 80%, "
        'or "free" for what is free now'
    )


def _on_or_off(value: Any, label: str) -> bool | None:
    return must_be("true or false", lambda it: isinstance(it, bool))(value, label) or None


_zero = must_be("a stage of ZeRO, 0 to 3", lambda it: it in range(4) and not isinstance(it, bool))
_wandb = must_be('the name of a project, or "off"', lambda it: bool(str(it).strip()))


# --------------------------------------------------------------------------------- the settings


# A setting is an option that `config.json` keeps; one that `may_change` leaves the run the same.
_PANELS = (_BATCH, _RUN, "Learning rate, warm-up, betas")
_batch_setting, _run_setting, _follows_setting = (
    partial(option, panel=panel, stored=True) for panel in _PANELS
)
_batch_choice, _run_choice, _follows_choice = (
    partial(choice, panel=panel, stored=True) for panel in _PANELS
)


@dataclass(frozen=True)
class Config:
    """Every option of `wholebatch train`; those that decide a run are kept in `config.json`."""

    recipe: str | None = recipe_argument(
        "A Python file with model(), data() and loss(model, micro), or an embedded recipe: "
        "bytes-gpt (the default) or digits-cnn."
    )
    batch_size: int = _batch_setting(
        32,
        "N|auto|SCHEDULE",
        "Samples per update, over all ranks. auto, auto:64 or auto:64-1024: doubled as the "
        "critical batch grows; --steps then counts the data. Or a schedule over updates, epochs or "
        "tokens: 64@0,128@1000 or 64@0,128@2ep or 64@0,128@2Mtok.",
        typed=str,
        check=whole_number(),
    )
    batch_schedule: str | None = field(
        default=None, metadata={"stored": True, "check": _schedule}
    )  # given as --batch-size, which is then its largest, or the first of "auto"
    micro_batch: int | str = _batch_setting(
        "auto",
        'auto|N|"N tokens"',
        "Size of a micro-batch: the part of the batch that is in memory at a time.",
        typed=str,
        check=_micro_batch,
    )
    precision: str = _batch_setting(
        "full",
        "full|bf16|fp16|fp8|bf16-pure",
        "full (or fp32): as the model is. bf16, fp16: autocast. fp8: bf16 with linear layers in 8 "
        "bits. bf16-pure: 16-bit parameters, gradients added in fp32.",
        check=_precision,
    )
    memory: str | None = _batch_setting(
        None,
        "SIZE|SHARE|free",
        "Memory to use: 20GiB, 0.8 of the device, or what is free. Without --micro-batch, the "
        "largest that fits is chosen.",
        check=_memory,
        may_change=True,
    )
    fit: bool = switch(
        "If not even one sample fits: use bf16 autocast, then gradient checkpointing, then "
        "optimizer state in host memory.",
        _BATCH,
        check=_on_or_off,
        in_file=True,
    )
    checkpointing: bool = switch(
        "Gradient checkpointing of the model's repeated blocks: recompute activations in the "
        "backward pass.",
        _BATCH,
        check=_on_or_off,
        stored=True,
    )
    clip_norm: float | None = _batch_setting(
        None, "NORM", "Clip the gradient of the whole batch to this norm.", check=positive_number
    )
    lr: float | None = _batch_setting(
        None, "RATE", "Learning rate, instead of the recipe's.", check=positive_number
    )
    execute: str = _batch_choice(
        "auto|eager|compile|graph",
        "How to run a micro-batch: plain torch, compiled, or as a CUDA graph.",
    )
    optimizer_state: str = _batch_choice(
        "device|host",
        "Where the optimizer's state is between updates: on the device or in host memory.",
    )
    batchnorm: str = _batch_choice(
        "exact|freeze|allow|refuse",
        "What BatchNorm normalises by. exact: the whole batch, which is not split. freeze: running "
        "statistics. allow: each micro-batch.",
    )
    lr_steps: int | None = _follows_setting(
        None,
        "N",
        "Length of the learning-rate schedule in updates. Afterwards the rate stays. Default: "
        "--steps when the run began.",
        check=whole_number(),
        may_change=True,
    )
    lr_rule: str | None = _follows_choice(
        "none|linear|sqrt",
        "How the learning rate follows the batch size (linear: SGD; sqrt: Adam). Default: none; "
        "with --batch-size auto the one for the optimizer.",
        default=None,
    )
    base_batch: int | None = _follows_setting(
        None,
        "N",
        "Batch size that the learning rate and betas were chosen for. Default: the first of the "
        "schedule, else the recipe's.",
        check=whole_number(),
    )
    betas: str = _follows_choice(
        "keep|beta2|both",
        "Which of Adam's betas keep their half-life in tokens when the batch size changes.",
    )
    weight_decay: str = _follows_choice(
        "keep|tokens",
        "tokens: AdamW's weight decay keeps its half-life in tokens when the batch size changes.",
    )
    warmup: str | None = _follows_setting(
        None,
        "N|Nep|Ntok",
        "Warm-up of the learning rate in updates (500), epochs (5ep) or tokens (2Mtok). It starts "
        "at the rate of the base batch, or at 0 without --lr-rule.",
        check=lambda value, label: str(parse_amount(str(value), label)),
    )
    steps: int = _run_setting(100, "N", "Number of updates.", check=whole_number(), may_change=True)
    out: Path | None = option(None, "DIR", "Folder of the run. Default: runs/RECIPE-TIME.", _RUN)
    resume: bool = switch("Continue the run in --out, else the newest in runs/, bit for bit.", _RUN)
    auto_resume: bool = switch(
        "Continue the run in --out if it exists, else start it. Restarts by torchrun do this "
        "without the option.",
        _RUN,
    )
    checkpoint_every: int = _run_setting(
        50, "N", "Updates between checkpoints.", check=whole_number(), may_change=True
    )
    seed: int = _run_setting(
        0, "N", "Seed of the weights and of the order of the data.", check=whole_number(0)
    )
    noise: int | str = _run_setting(
        "auto",
        "auto|off|N",
        "Estimate the gradient noise scale from every N-th window (auto: once in 64 "
        "micro-batches), and advise on the batch size.",
        typed=str,
        check=_noise,
    )
    workers: int = _run_setting(
        0,
        "N",
        "Processes that read batches ahead. The batches are the same.",
        check=whole_number(0),
        may_change=True,
    )
    validate: int | None = _run_setting(
        None,
        "N",
        "Evaluate the recipe's validation() every N updates, and once at the end.",
        check=whole_number(),
        may_change=True,
    )
    wandb: str | None = _run_setting(
        None,
        "PROJECT|off",
        "Also log to this project of Weights & Biases (WANDB_MODE=offline: no network).",
        check=_wandb,
        may_change=True,
    )
    source: Path | None = option(
        None,
        "FILE",
        "Read settings from a JSON file: manifest.json repeats a run, tune.json uses the best "
        "settings. Options on the command line win.",
        _RUN,
        flag="--from",
    )
    device: str = option("auto", "auto|cpu|cuda", "Device.", _RUN, in_file=True)
    parallel: str = choice(
        "ddp|fsdp2|deepspeed|pipeline",
        "Under torchrun: the whole model on every rank, sharded, in a DeepSpeed engine, or cut "
        "into pipeline stages.",
        _RUN,
        in_file=True,
    )
    zero: int = _run_setting(
        1,
        "0|1|2|3",
        "With --parallel deepspeed: shard nothing (0), optimizer state (1, the default), also "
        "gradients (2), also parameters (3).",
        check=_zero,
    )
    schedule: str = _run_choice(
        "1f1b|gpipe|interleaved",
        "With --parallel pipeline: the order of forward and backward passes. interleaved has two "
        "stages per rank.",
        may_change=True,
    )
    sync: str = _run_choice(
        "auto|hold|every|gathered",
        "With --parallel fsdp2: reduce once per window (hold) or in every micro-batch; gathered "
        "also keeps the whole parameters over a window.",
        may_change=True,
    )

    @property
    def stored(self) -> dict[str, Any]:
        """The settings that `config.json` keeps."""
        return {name: getattr(self, name) for name, one in _FIELDS.items() if _is_stored(one)}

    @property
    def grows(self) -> bool:
        """True if the batch size follows the gradient noise."""
        return (self.batch_schedule or "").startswith("auto")

    @property
    def horizon(self) -> int:
        """Updates that the learning-rate schedule is made for."""
        return self.lr_steps or self.steps

    @property
    def tokens(self) -> int | None:
        """The budget, if the micro-batch is one of tokens."""
        match = _TOKENS.fullmatch(str(self.micro_batch))
        return int(match[1]) if match else None

    @property
    def budget(self) -> float | str | None:
        """The argument of `WholeBatch(memory=)`: a share of the device is a number there."""
        with suppress(ValueError):
            return None if self.memory is None else float(self.memory)
        return self.memory

    @property
    def autocast(self) -> str:
        """The argument of `WholeBatch(precision=)`: pure 16-bit parameters need no autocast."""
        return "full" if self.precision == "bf16-pure" else self.precision


_FIELDS = {one.name: one for one in fields(Config)}


def _is_stored(one: Field[Any]) -> bool:
    return bool(one.metadata.get("stored"))


def check(name: str, value: Any, label: str) -> Any:
    """Return the value as it is meant, or refuse it with what is allowed. None stays None."""
    checked = _FIELDS[name].metadata.get("check")
    return value if value is None or checked is None else checked(value, label)


def like_train(
    name: str,
    help: str,
    panel: str | None,
    *,
    default: Any = None,
    metavar: str | None = None,
    **more: Any,
) -> Any:
    """Declare an option of another command that is shown and checked as `train`'s of this name."""
    known = _FIELDS[name].metadata
    shown = metavar or known["metavar"]
    return option(default, shown, help, panel, check=known["check"], **more)


# ----------------------------------------------------------------------------------- precedence


def resolve(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, stored: Mapping[str, Any] | None
) -> Config:
    """Return the settings, each from the first place that has it; a stored run is not changed."""
    if stored is not None and (given.get("batch_size") or given.get("batch_schedule")):
        schedule = check("batch_schedule", given.get("batch_schedule"), "--batch-size")
        if schedule != (kept := stored.get("batch_schedule")):
            size = schedule or given.get("batch_size")
            _refuse_change(f"--batch-size {size}", kept or "one batch size throughout")
    values: dict[str, Any] = {}
    for name, one in _FIELDS.items():
        asked = check(name, given.get(name), flag_of(one))
        if asked is not None and stored is not None and _is_stored(one):
            kept = stored.get(name, one.default)
            if asked != kept and not one.metadata.get("may_change"):
                _refuse_change(f"{flag_of(one)} {asked}", kept)
        if asked is not None:
            values[name] = asked
        elif stored is not None and _is_stored(one):
            values[name] = stored.get(name, one.default)  # absent: of before there was it
        else:
            values[name] = _default(name, given, defaults)
    if stored is not None and values["lr_steps"] is None and stored["steps"] != values["steps"]:
        values["lr_steps"] = stored["steps"]  # more updates do not change the schedule
    if values["wandb"] == "off":
        values["wandb"] = None
    if given.get("fit") and values["memory"] is None:
        values["memory"] = "free"
    return Config(**values)


def _default(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return the value of a setting that was not given: the recipe's, else the default."""
    if name == "micro_batch" and (given.get("memory") is not None or given.get("fit")):
        return "auto"  # who says how much memory there is, wants it used
    if name in defaults and name != "lr":  # the rate is the recipe's own affair: its optimizer's
        return check(name, defaults[name], f"the recipe's defaults[{name!r}]")
    return _FIELDS[name].default


def _refuse_change(asked: str, kept: Any) -> None:
    raise OptionError(
        f"{asked}: the run that --resume continues has {'none given' if kept is None else kept}; "
        "leave it out, or begin a new run in another --out"
    )


def refuse_idle(
    typed: Collection[str], config: Config, *, parallel: str, schedule_ends: bool = True
) -> None:
    """Refuse what was typed and would do nothing in this run, with the option it belongs to."""
    if "lr_steps" in typed and not schedule_ends:
        raise OptionError(
            f"--lr-steps {config.lr_steps}: the recipe's learning-rate schedule is not made for a "
            "number of updates; that needs scheduler(optimizer, steps)"
        )
    rule = config.lr_rule or ("auto" if config.grows else "none")
    if "base_batch" in typed and (rule, config.betas, config.weight_decay) == (
        "none",
        "keep",
        "keep",
    ):
        raise OptionError(
            f"--base-batch {config.base_batch}: nothing follows the batch size; it belongs to "
            "--lr-rule, --betas or --weight-decay"
        )
    if parallel == "pipeline":
        for name, plain in (("execute", ("auto", "eager")), ("noise", ("auto", "off"))):
            value = getattr(config, name)
            if name in typed and value not in plain:
                raise OptionError(
                    f"--{name} {value} with --parallel pipeline: its stages do not have it; "
                    "leave it out"
                )


# ------------------------------------------------------------------------------ the file of --from


@dataclass(frozen=True)
class SettingsFile:
    """The content of the file of `--from`; empty where none was given."""

    path: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    digest: str | None = None
    threads: int | None = None
    ranks: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def notes(self, *, digest: str, versions: Mapping[str, str], ranks: int) -> list[str]:
        """Return one line for each difference from here, by which the numbers may differ."""
        found = []
        if self.digest is not None and self.digest != digest:
            found.append(f"the recipe has changed since {self.path} was written")
        if self.ranks not in (None, ranks):
            found.append(f"{self.path} was written by {self.ranks} ranks, here there are {ranks}")
        for name, here in versions.items():
            then = self.versions.get(name, here)
            if here != then:
                found.append(f"{self.path} was written with {name} {then}, here it is {here}")
        return found


def read_settings_file(path: Path | None) -> SettingsFile:
    """Read the file of `--from`; an OptionError says what is wrong with it."""
    if path is None:
        return SettingsFile()
    content = load_json(path, OptionError, f"--from {path}")
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise OptionError(
            f'--from {path}: has no object "settings"; give manifest.json of a run, or what '
            "wholebatch tune wrote"
        )
    known = [n for n, one in _FIELDS.items() if _is_stored(one) or one.metadata.get("in_file")]
    for name in settings:
        if name not in known:
            raise OptionError(
                f"--from {path}: the setting {name!r} is none of train's: {', '.join(known)}"
            )
    device, versions = content.get("device"), content.get("versions")
    here = device if isinstance(device, dict) else {}
    return SettingsFile(
        path,
        settings={name: value for name, value in settings.items() if value is not None},
        recipe=_recipe_in(content.get("recipe"), path),
        digest=content.get("recipe_sha256"),
        threads=_count(here.get("threads")),
        ranks=_count(here.get("ranks")),
        versions=versions if isinstance(versions, dict) else {},
    )


def given_of(typed: Mapping[str, Any], source: SettingsFile) -> Given:
    """Return the options that were given, on the command line or else in the file, checked."""
    label = f"--from {source.path}:"
    told = _with_schedule(
        {name: _number(name, value) for name, value in source.settings.items()},
        f"{label} batch_size",
    )
    for name, value in told.items():
        check(name, value, f"{label} {name}")
    typed = _with_schedule(dict(typed), "--batch-size")
    for name, value in typed.items():
        check(name, value, flag_of(_FIELDS[name]))
    if "batch_size" in typed:  # the schedule of the file is not that of another size
        told.pop("batch_schedule", None)
    if source.recipe is not None:
        told["recipe"] = source.recipe
    return {**told, **typed}


def _number(name: str, value: Any) -> Any:
    """Convert a number that is written as a string, as one types it after an option."""
    kind = _FIELDS[name].metadata.get("typed") or get_type_hints(Config)[name]
    for number in (int, float):
        if isinstance(value, str) and kind in (number, number | None):
            with suppress(ValueError):
                return number(value)
    return value


def _with_schedule(settings: Given, label: str) -> Given:
    """Read a `batch_size` that is a schedule: the batch size is then its largest."""
    text = settings.get("batch_schedule", settings.get("batch_size"))
    if text is None or isinstance(text, int):
        return settings
    text = str(text).strip()
    if text.isascii() and text.isdigit():
        return {**settings, "batch_size": int(text)}
    if text.startswith("auto"):
        size = parse_auto(text, label)[0] or settings.pop("batch_size", None)
        known = {"batch_size": size} if isinstance(size, int) else {}  # else the recipe's
        return {**settings, "batch_schedule": text, **known}
    if "@" not in text:
        raise OptionError(
            f"{label} {text}: must be a whole number of samples, auto, or a schedule such as "
            "64@0,128@1000"
        )
    schedule = BatchSchedule.parse(text, label)
    if len(schedule.changes) == 1:
        return {**settings, "batch_size": schedule.first, "batch_schedule": None}
    return {**settings, "batch_size": schedule.largest, "batch_schedule": str(schedule)}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _recipe_in(name: Any, path: Path) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise OptionError(f'--from {path}: "recipe" must be a name or a path')
    beside = path.parent / name
    return str(beside) if name.endswith(".py") and beside.is_file() else name


# ----------------------------------------------------------------------------------- config.json


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a run's `config.json`: the recipe and its settings."""
    try:
        stored = read_json(path)
        if not stored["settings"].keys() >= _ALWAYS_STORED or not isinstance(stored["recipe"], str):
            raise KeyError
    except OSError as error:
        raise StateError(f"{path} cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise StateError(
            f"{path} is damaged: it does not hold the settings of a run{why}"
        ) from None
    result: dict[str, Any] = stored
    return result


def config_text(config: Config, *, recipe: str, digest: str, about: Mapping[str, Any]) -> str:
    content = {"recipe": recipe, "recipe_sha256": digest, "settings": config.stored, **about}
    return json.dumps(content, indent=2) + "\n"
