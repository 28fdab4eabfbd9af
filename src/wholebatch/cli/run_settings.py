"""The settings of a run: the command line, else the stored run, else the recipe, else a default.

Nothing here imports torch: a wrong option is refused at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wholebatch.core.json_files import read_json
from wholebatch.core.plain_files import reason
from wholebatch.errors import OptionError, StateError
from wholebatch.tune.batch_scaling import BatchSchedule, parse_amount

__all__ = [
    "PARALLEL",
    "PRECISIONS",
    "Config",
    "Given",
    "check",
    "check_recipe",
    "config_text",
    "read_config",
    "refuse_idle",
    "resolve",
]

PRECISIONS = ("full", "fp32", "bf16", "fp16", "bf16-pure")
PARALLEL = ("ddp", "fsdp2", "deepspeed", "pipeline")
SCHEDULES = ("1f1b", "gpipe", "interleaved")
_TOKENS = re.compile(r"(\d+)\s*tokens?")
_FALLBACK: dict[str, Any] = {
    "batch_size": 32,
    "micro_batch": "auto",
    "steps": 100,
    "precision": "full",
    "clip_norm": None,
    "lr": None,
    "seed": 0,
    "checkpoint_every": 50,
    "memory": None,
    "checkpointing": False,
    "zero": 1,
    "schedule": "1f1b",
    "batch_schedule": None,
    "lr_rule": "none",
    "base_batch": None,
    "betas": "keep",
    "warmup": None,
    "execute": "auto",
    "gradients": "device",
    "noise": "auto",
    "wandb": None,
    "lr_steps": None,
}
_ONE_OF = {
    "lr_rule": ("none", "linear", "sqrt"),
    "betas": ("keep", "beta2", "both"),
    "execute": ("auto", "eager", "compile", "graph"),
    "gradients": ("device", "host", "swap", "release", "moments"),
}
# What a resumed run may change without becoming another run.
_MAY_CHANGE = ("steps", "lr_steps", "checkpoint_every", "memory", "wandb", "schedule")


@dataclass(frozen=True)
class Given:
    """What the user wrote; None where nothing was written."""

    batch_size: int | None = None
    micro_batch: str | None = None
    steps: int | None = None
    precision: str | None = None
    clip_norm: float | None = None
    lr: float | None = None
    seed: int | None = None
    checkpoint_every: int | None = None
    memory: str | None = None
    checkpointing: bool | None = None
    fit: bool | None = None
    zero: int | None = None
    schedule: str | None = None
    batch_schedule: str | None = None
    lr_rule: str | None = None
    base_batch: int | None = None
    betas: str | None = None
    warmup: str | None = None
    execute: str | None = None
    gradients: str | None = None
    noise: int | str | None = None
    wandb: str | None = None
    lr_steps: int | None = None


@dataclass(frozen=True)
class Config:
    """Everything that decides a run, as `config.json` keeps it."""

    batch_size: int
    micro_batch: int | str
    steps: int
    precision: str
    clip_norm: float | None
    lr: float | None
    seed: int
    checkpoint_every: int
    memory: str | None = None
    checkpointing: bool = False
    zero: int = 1
    schedule: str = "1f1b"
    batch_schedule: str | None = None
    lr_rule: str = "none"
    base_batch: int | None = None
    betas: str = "keep"
    warmup: str | None = None
    execute: str = "auto"
    gradients: str = "device"
    noise: int | str = "auto"
    wandb: str | None = None
    lr_steps: int | None = None

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
        """What `WholeBatch(memory=)` is given: a share of the device is a number there."""
        with suppress(ValueError):
            return None if self.memory is None else float(self.memory)
        return self.memory

    @property
    def autocast(self) -> str:
        """What `WholeBatch(precision=)` is given; pure 16-bit parameters need no autocast."""
        return "full" if self.precision == "bf16-pure" else self.precision


def resolve(
    given: Given, defaults: Mapping[str, Any], *, stored: Mapping[str, Any] | None
) -> Config:
    """The settings, each from the first place that says it; a stored run is not changed."""
    values: dict[str, Any] = {}
    if stored is not None and given.batch_size is not None:
        _same_schedule(given, stored.get("batch_schedule"))
    for field in fields(Config):
        name = field.name
        asked = check(name, getattr(given, name), _flag(name))
        if stored is not None:
            kept = stored.get(name, _FALLBACK[name])  # a run of before there was this setting
            if asked is not None and asked != kept and name not in _MAY_CHANGE:
                has = "none given" if kept is None else kept
                raise OptionError(
                    f"{_flag(name)} {asked}: the run that --resume continues has {has}; leave it "
                    "out, or begin a new run in another --out"
                )
            values[name] = kept if asked is None else asked
        elif asked is not None:
            values[name] = asked
        elif name == "micro_batch" and (given.memory is not None or given.fit):
            values[name] = "auto"  # who says how much memory there is, wants it used
        elif name == "lr":
            values[name] = None  # the recipe's own affair: its optimizer, or defaults["lr"]
        elif name in defaults:
            values[name] = check(name, defaults[name], f"the recipe's defaults[{name!r}]")
        else:
            values[name] = _FALLBACK[name]
    if stored is not None and values["lr_steps"] is None and stored["steps"] != values["steps"]:
        values["lr_steps"] = stored["steps"]  # more updates do not change the schedule
    if values["precision"] == "fp32":
        values["precision"] = "full"
    if values["wandb"] == "off":
        values["wandb"] = None
    if given.fit and values["memory"] is None:
        values["memory"] = "free"
    return Config(**values)


def _same_schedule(given: Given, kept: str | None) -> None:
    asked = check("batch_schedule", given.batch_schedule, "--batch-size")
    if asked != kept:
        has = kept or "one batch size throughout"
        raise OptionError(
            f"--batch-size {asked or given.batch_size}: the run that --resume continues has {has}; "
            "leave it out, or begin a new run in another --out"
        )


def check(name: str, value: Any, label: str) -> Any:
    """The value as it is meant, or an OptionError that says what is allowed. None stays None."""
    if value is None:
        return None
    if name == "micro_batch":
        return _micro_batch(value, label)
    if name == "precision":
        if value not in PRECISIONS:
            raise OptionError(f"{label} {value}: must be one of {', '.join(PRECISIONS)}")
        return "full" if value == "fp32" else value
    if name == "parallel":
        if value not in PARALLEL:
            raise OptionError(f"{label} {value}: must be one of {', '.join(PARALLEL)}")
        return value
    if name == "memory":
        return _memory(value, label)
    if name == "schedule":
        if value not in SCHEDULES:
            raise OptionError(f"{label} {value}: must be one of {', '.join(SCHEDULES)}")
        return value
    if name == "zero":
        if value not in (0, 1, 2, 3) or isinstance(value, bool):
            raise OptionError(f"{label} {value}: must be a stage of ZeRO, 0 to 3")
        return value
    if name in _ONE_OF:
        if value not in _ONE_OF[name]:
            raise OptionError(f"{label} {value}: must be one of {', '.join(_ONE_OF[name])}")
        return value
    if name == "batch_schedule":
        return str(BatchSchedule.parse(str(value), label))
    if name == "warmup":
        return str(parse_amount(str(value), label))
    if name == "noise":
        return _noise(value, label)
    if name == "wandb":
        if not str(value).strip():
            raise OptionError(f'{label} {value}: must be the name of a project, or "off"')
        return str(value)
    if name in ("checkpointing", "fit"):
        if not isinstance(value, bool):
            raise OptionError(f"{label} {value}: must be true or false")
        return value or None
    if name in ("clip_norm", "lr"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise OptionError(f"{label} {value}: must be a number above 0")
        return float(value)
    least = 0 if name == "seed" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{label} {value}: must be a whole number, at least {least}")
    if value >= 1 << 63:  # torch's own limit for a seed; of anything else nobody has so many
        raise OptionError(f"{label} {value}: must be a whole number below 2**63")
    return value


def check_recipe(name: str | None) -> None:
    """Refuse an empty name (a variable of a script that is not set): it is not the default."""
    if name is not None and not name.strip():
        from wholebatch.cli.recipes import load_recipe

        load_recipe(name)  # says which there are


def refuse_idle(
    typed: Collection[str], config: Config, *, parallel: str, schedule_ends: bool = True
) -> None:
    """Refuse what was typed and would do nothing in this run, with the option it belongs to."""
    if "lr_steps" in typed and not schedule_ends:
        raise OptionError(
            f"--lr-steps {config.lr_steps}: the recipe's learning-rate schedule is not made for a "
            "number of updates; that needs scheduler(optimizer, steps)"
        )
    if "base_batch" in typed and (config.lr_rule, config.betas) == ("none", "keep"):
        raise OptionError(
            f"--base-batch {config.base_batch}: nothing follows the batch size; it belongs to "
            "--lr-rule or --betas"
        )
    if parallel == "pipeline":
        for name, plain in (("execute", ("auto", "eager")), ("noise", ("auto", "off"))):
            value = getattr(config, name)
            if name in typed and value not in plain:
                raise OptionError(
                    f"{_flag(name)} {value} with --parallel pipeline: its stages do not have it; "
                    "leave it out"
                )


def _micro_batch(value: Any, label: str) -> int | str:
    text = str(value).strip()
    match = _TOKENS.fullmatch(text)
    if match and int(match[1]) > 0:
        return f"{int(match[1])} tokens"
    if text == "auto":
        return text
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise OptionError(
        f'{label} {text}: must be "auto", a number of samples, or a budget such as "4096 tokens"'
    )


def _noise(value: Any, label: str) -> int | str:
    text = str(value).strip()
    if text in ("auto", "off"):
        return text
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise OptionError(f'{label} {text}: must be "auto", "off", or every how many windows')


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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_config(path: Path) -> dict[str, Any]:
    """What `config.json` of a run says: the recipe and its settings."""
    try:
        stored = read_json(path)
        wanted = {field.name for field in fields(Config) if field.default is MISSING}
        if not wanted <= stored["settings"].keys() or not isinstance(stored["recipe"], str):
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
    """What is written to `config.json`."""
    content = {"recipe": recipe, "recipe_sha256": digest, "settings": asdict(config), **about}
    return json.dumps(content, indent=2) + "\n"
