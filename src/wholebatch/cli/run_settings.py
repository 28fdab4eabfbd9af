"""The options of `wholebatch train` and the settings of a run that come from them.

A setting comes from the command line, else from the stored run, else from the recipe, else it is
the default. Nothing here imports torch: a wrong option is refused at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from wholebatch import __version__
from wholebatch.cli.command_options import (
    Check,
    choice,
    count_of,
    flag_of,
    must_be,
    option,
    positive_number,
    recipe_argument,
    switch,
    whole_number,
)
from wholebatch.errors import OptionError, StateError
from wholebatch.plain_files import load_json

AUTOCAST = ("full", "fp32", "bf16", "fp16")
PRECISIONS = (*AUTOCAST, "bf16-pure")
_TOKENS = re.compile(r"(\d+)\s*tokens?")
_BATCH, _RUN = "Batch and update", "Run"

Given: TypeAlias = dict[str, Any]
"""The options that the user gave, by name."""


# --------------------------------------------------------------------- checks of single settings


def _micro_batch(value: Any, label: str) -> int | str:
    text = str(value).strip()
    match = _TOKENS.fullmatch(text)
    if match and int(match[1]) > 0:
        return f"{int(match[1])} tokens"
    if text == "auto":
        return text
    with suppress(ValueError):
        return count_of(text)
    allowed = '"auto", a number of samples, or a budget such as "4096 tokens"'
    raise OptionError(f"{label} {text}: must be {allowed}")


def precision_of(*names: str) -> Check:
    """Return a check for one of these precisions; it returns "full" for "fp32"."""

    def check(value: Any, label: str) -> str:
        text = str(value)
        if text in names:
            return "full" if text == "fp32" else text
        raise OptionError(f"{label} {text}: must be one of {', '.join(names)}")

    return check


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


def _lr_rule(value: Any, label: str) -> str:
    """Return a rule, with the batch size that it scales from if one was given: sqrt:64."""
    if re.fullmatch(r"none|(linear|sqrt)(:0*[1-9]\d{0,17})?", str(value)) is None:
        raise OptionError(
            f"{label} {value}: must be none, linear or sqrt, or with the batch size to scale from, "
            "such as sqrt:64"
        )
    return str(value)


def _steps(value: Any, label: str) -> str:
    """Return a schedule such as 0:2,300:4, which begins at update 0 and goes up."""
    text = str(value).replace(" ", "")
    pairs = [pair.split(":") for pair in text.split(",")] if re.fullmatch(r"[\d:,]+", text) else []
    is_right = all(len(pair) == 2 and all(pair) and int(pair[1]) for pair in pairs)
    updates = [int(pair[0]) for pair in pairs] if is_right else []
    if not updates or updates[0] != 0 or updates != sorted(set(updates)):
        raise OptionError(
            f"{label} {value}: must be updates and steps from update 0 on, such as 0:2,300:4"
        )
    return text


_on_or_off = must_be("True or False", lambda value: isinstance(value, bool))
_wandb = must_be("the name of a project", lambda value: bool(str(value).strip()))


# --------------------------------------------------------------------------------- the settings


# A setting is an option that `config.json` keeps; one that `may_change` leaves the run the same.
_batch_setting, _run_setting = (
    partial(option, panel=panel, stored=True) for panel in (_BATCH, _RUN)
)
_batch_choice = partial(choice, panel=_BATCH, stored=True)


def _recipe_setting(default: int, check: Check) -> Any:
    """Declare a setting that a recipe's `defaults` may have, and no option."""
    return field(default=default, metadata={"check": check, "stored": True, "may_change": True})


@dataclass(frozen=True)
class Config:
    """Every option of `wholebatch train`; those that decide a run are kept in `config.json`."""

    recipe: str | None = recipe_argument(
        "A Python file with model(), data() and loss(model, micro), or an embedded recipe: "
        "bytes-gpt (the default) or digits-cnn."
    )
    batch_size: int = _batch_setting(
        32, "N", "Samples per update, over all ranks.", check=whole_number()
    )
    micro_batch: int | str = _batch_setting(
        "auto",
        'auto|N|"N tokens"',
        "Size of a micro-batch: the part of the batch that is in memory at a time.",
        typed=str,
        check=_micro_batch,
    )
    precision: str = _batch_setting(
        "full",
        "|".join(PRECISIONS),
        "full (or fp32): as the model is. bf16, fp16: autocast. bf16-pure: 16-bit parameters, "
        "gradients added in fp32.",
        check=precision_of(*PRECISIONS),
    )
    memory: str | None = _batch_setting(
        None,
        "SIZE|SHARE|free",
        "Memory to use: 20GiB, 0.8 or 80% of the device, or what is free now. Without "
        "--micro-batch, the largest that fits is chosen.",
        check=_memory,
        may_change=True,
    )
    checkpointing: bool = switch(
        "Gradient checkpointing of the model's repeated blocks: recompute activations in the "
        "backward pass.",
        _BATCH,
        check=_on_or_off,
        stored=True,
    )
    optimizer_state: str = _batch_choice(
        "device|host", "Where the optimizer's state is kept: in device memory or in host memory."
    )
    clip_norm: float | None = _batch_setting(
        None, "NORM", "Clip the gradient of the whole batch to this norm.", check=positive_number
    )
    lr: float | None = _batch_setting(
        None, "RATE", "Learning rate, instead of the recipe's.", check=positive_number
    )
    lr_rule: str = _batch_setting(
        "none",
        "none|linear|sqrt[:N]",
        "Scale the learning rate with the batch: by its ratio to N, or the root of it. N is the "
        "batch size that the rate was chosen for; default: the recipe's.",
        check=_lr_rule,
    )
    warmup: int | None = _batch_setting(
        None,
        "N",
        "Raise the learning rate linearly over the first N updates.",
        check=whole_number(),
    )
    steps: str | None = _batch_setting(
        None,
        "UPDATE:STEPS,...",
        "Micro-batches per update, by update: 0:2,300:4. The batch grows with them; a window that "
        "made no update counts, too.",
        check=_steps,
    )
    execute: str = _batch_choice(
        "auto|eager|compile|graph",
        "How to run a micro-batch: plain torch, compiled, or as a CUDA graph.",
    )
    batchnorm: str = _batch_choice(
        "exact|freeze|allow|refuse",
        "What BatchNorm normalises by. exact: the whole batch, which is not split. freeze: running "
        "statistics. allow: each micro-batch.",
    )
    updates: int = _run_setting(
        100, "N", "Number of updates.", check=whole_number(), may_change=True
    )
    out: Path | None = option(None, "DIR", "Folder of the run. Default: runs/RECIPE-TIME.", _RUN)
    resume: bool = switch(
        "Continue the run in --out, bit for bit. If there is none, begin it (with a RECIPE).",
        _RUN,
    )
    checkpoint_every: int = _recipe_setting(50, whole_number())
    seed: int = _run_setting(
        0, "N", "Seed of the weights and of the order of the data.", check=whole_number(0)
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
        "PROJECT",
        "Also log to this project of Weights & Biases (WANDB_MODE=offline: no network).",
        check=_wandb,
        may_change=True,
    )

    @property
    def stored(self) -> dict[str, Any]:
        """The settings that `config.json` keeps."""
        return {name: getattr(self, name) for name, option in _FIELDS.items() if _is_stored(option)}

    @property
    def tokens(self) -> int | None:
        """The budget, if the micro-batch is one of tokens."""
        match = _TOKENS.fullmatch(str(self.micro_batch))
        return int(match[1]) if match else None

    @property
    def schedule(self) -> list[list[int]]:
        """The updates at which `--steps` begins another number of micro-batches, and those."""
        return [[*map(int, pair.split(":"))] for pair in (self.steps or "0:1").split(",")]

    def steps_at(self, window: int) -> int:
        """Return the micro-batches of a window by the schedule of `--steps`; 1 without one."""
        return [steps for begins, steps in self.schedule if begins <= window][-1]

    def base_batch(self, default: int) -> int:
        """Return the batch size that `--lr-rule` scales the rate from."""
        return int(self.lr_rule.partition(":")[2] or default)

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


_FIELDS = {option.name: option for option in fields(Config)}


def _is_stored(option: Field[Any]) -> bool:
    return bool(option.metadata.get("stored"))


def like_train(
    name: str, help: str = "", panel: str | None = None, *, default: Any = None, **more: Any
) -> Any:
    """Declare an option of another command that is shown and checked as `train`'s of this name."""
    known = _FIELDS[name].metadata
    shown = {key: more.pop(key, known[key]) for key in ("metavar", "check")}
    return option(default, help=help or known["help"], panel=panel, **shown, **more)


def autocast_option(panel: str | None = None, **more: Any) -> Any:
    """Declare the option of a precision that is computed in, beside parameters as they are."""
    names = {"metavar": "|".join(AUTOCAST), "check": precision_of(*AUTOCAST)}
    return like_train("precision", "Precision of the computation.", panel, **names, **more)


# ----------------------------------------------------------------------------------- precedence


def resolve(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, stored: Mapping[str, Any] | None
) -> Config:
    """Return the settings, each from the first place that has it; a stored run is not changed."""
    values: dict[str, Any] = {}
    for name, setting in _FIELDS.items():
        check, value = setting.metadata.get("check"), given.get(name)
        if value is not None:
            value = value if check is None else check(value, flag_of(setting))
            kept = None if stored is None else stored.get(name, setting.default)
            may_change = (
                stored is None or not _is_stored(setting) or setting.metadata.get("may_change")
            )
            if not may_change and value != kept:
                raise OptionError(
                    f"{flag_of(setting)} {value}: the run that --resume continues has "
                    f"{'none given' if kept is None else kept}; leave it out, or begin a new run "
                    "in another --out"
                )
        elif stored is not None and _is_stored(setting):
            value = stored.get(name, setting.default)
        elif name == "micro_batch" and given.get("memory") is not None:
            value = "auto"  # a budget is given to be used
        elif name in defaults and name != "lr":  # the rate is the recipe's optimizer's
            value = defaults[name]
            if value is not None and check is not None:
                value = check(value, f"the recipe's defaults[{name!r}]")
        else:
            value = setting.default
        values[name] = value
    config = Config(**values)
    if config.steps is not None and not isinstance(config.micro_batch, int):
        raise OptionError(f"--steps {config.steps}: also give --micro-batch, a number of samples")
    if config.steps is not None and given.get("batch_size") is not None:
        raise OptionError("--batch-size with --steps: the batch is micro-batch × steps × ranks")
    return config


# ----------------------------------------------------------------------------------- config.json


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a run's `config.json`: the recipe and its settings."""
    stored = load_json(path, StateError, path)
    settings = stored.get("settings") if isinstance(stored, dict) else None
    if not isinstance(settings, dict) or not isinstance(stored.get("recipe"), str):
        raise StateError(f"{path} is damaged: it does not hold the settings of a run")
    for name, value in settings.items():
        if name not in _FIELDS:
            began = (stored.get("versions") or {}).get("wholebatch", "?")
            raise StateError(
                f"{path}: the setting {name!r} is not known; the run began with wholebatch "
                f"{began}, and this is {__version__}: continue it with that version"
            )
        check = _FIELDS[name].metadata.get("check")
        if value is not None and check is not None:
            check(value, f"{path}: {name}")
    result: dict[str, Any] = stored
    return result


def config_text(config: Config, **about: Any) -> str:
    """Return the content of `config.json`."""
    return json.dumps({**about, "settings": config.stored}, indent=2) + "\n"
