"""What a message advises can be done: every option that it names is there, where it is raised.

A message says what was given, then a colon, then what to do. Whatever stands after the colon is
advice. An option in it (`name=`, `--name`) must be one of the entry point that raises the message,
and in a call (`wb.Close(nonfinite=...)`) one of what is called.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.cli.app import COMMANDS
from wholebatch.testing import assert_split_invariant

SOURCE = Path(wb.__file__).parent

# ------------------------------------------------------------------ what there is


def options_of(*calls: Any) -> set[str]:
    """Return the names of the parameters, and ** where every name is taken."""
    parameters = [one for call in calls for one in inspect.signature(call).parameters.values()]
    return {"**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}


TORCH = options_of(wb.WholeBatch, wb.Accumulator, wb.Accumulator.backward, wb.Accumulator.over)
"""Options of the two entry points that nearly all code serves."""
CALLED: dict[str, set[str]] = {
    name: options_of(call)
    for name, call in {
        **{f"wb.{name}": getattr(wb, name) for name in wb.__all__ if callable(getattr(wb, name))},
        **{f"wb.losses.{name}": getattr(wb.losses, name) for name in wb.losses.__all__},
        "backward": wb.Accumulator.backward,
        "over": wb.Accumulator.over,
        "Coupled": wb.Coupled,
        "tokens": wb.tokens,
        "WholeBatch": wb.WholeBatch,
        "Accumulator": wb.Accumulator,
        "DataLoader": torch.utils.data.DataLoader,
        "DistributedSampler": torch.utils.data.DistributedSampler,
    }.items()
}
"""Names that are called in messages, with their options."""
ADAPTERS: dict[str, set[str]] = {}
"""Options of the adapters, by the beginning of their paths."""


def read_options(name: str) -> set[str]:
    """Return the options of an adapter by its source: its library is not imported."""
    for path in sorted((SOURCE / "integrations").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if getattr(node, "name", None) == name:
                nodes = node.body if isinstance(node, ast.ClassDef) else [node]
                function = next(
                    one for one in nodes if getattr(one, "name", "") in ("__init__", name)
                )
                assert isinstance(function, ast.FunctionDef)
                arguments = function.args
                names = {
                    argument.arg
                    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                }
                return names | {"**"} if arguments.kwarg else names
    raise AssertionError(f"integrations/ defines no {name}")


for adapter in (
    "accelerate.AccelerateAccumulator",
    "lightning.ExactAccumulation",
    "lightning.FabricAccumulator",
    "transformers.exact",
    "keras.GradientAccumulateModel",
    "keras.GradientAccumulateOptimizer",
    "jax.accumulate",
):
    library, _, attribute = adapter.partition(".")
    CALLED[attribute] = read_options(attribute)
    ADAPTERS.setdefault(f"integrations/{library}", set()).update(CALLED[attribute])


OTHERS: dict[str, Any] = {
    "drop_last": torch.utils.data.DistributedSampler,
    "fused": torch.optim.AdamW,
    "mode": torch.compile,
    "reduction": functional.cross_entropy,
    "sparse": nn.Embedding,
    "track_running_stats": nn.BatchNorm1d,
    "use_reentrant": checkpoint,
}
"""Options of torch that messages advise."""
OF_TRAINERS = {
    *("fsdp_version", "gradient_checkpointing_kwargs", "lmbda", "router_aux_loss_coef"),
    "dataloader_drop_last",
    *("seq_kd", "use_cache"),
}
"""Options of Accelerate, Transformers and TRL that messages advise."""
PARTS = {
    "losses/": options_of(
        *(getattr(wb.losses, name) for name in wb.losses.__all__), wb.cross_entropy
    ),
    "two_pass_runner": {"rows"},  # of the contrastive losses, as the message says
    "pipeline": options_of(wb.Pipeline, wb.Close),
    "batch/": options_of(wb.samples, wb.tokens),
    "split_invariance/": options_of(assert_split_invariant),
    "memory/micro_batch_fitting": {"most"},  # a check of our own calls
}
"""Options of what else raises messages, by the beginning of the path."""


@cache
def flags_of(name: str) -> set[str]:
    """The flags of a command of the command line."""
    command = getattr(import_module(f"wholebatch.cli.{name}_command"), name)
    return {flag for action in command.parser()._actions for flag in action.option_strings}


# ------------------------------------------------------------------ what messages say


def texts(node: ast.AST) -> str:
    """The text of a string, with {} for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{}" if isinstance(value, ast.FormattedValue) else texts(value) for value in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages(path: Path) -> Iterator[str]:
    """Every string of a file that is a sentence: no docstring, no part of another one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(child) for child in ast.walk(node) if child is not node}
    for node in ast.walk(tree):
        if id(node) not in left_out and " " in (text := texts(node)):
            yield text


CALL = re.compile(r"([\w.]+)\(([^()]*)\)")
OPTION = re.compile(r"(?<![\w.-])([a-z_]+)=(?!=)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def advice_in(message: str) -> str:
    """What stands after the first colon that ends what was given."""
    return message.partition(": ")[2]


def wrong_advice(message: str, allowed: set[str], flags: set[str]) -> list[str]:
    """The options that a message advises and that are not there."""
    advised, wrong = advice_in(message), []
    for called, arguments in CALL.findall(advised):
        if called in CALLED:
            known = CALLED[called]
            wrong += [
                f"{called}({name}=)"
                for name in OPTION.findall(arguments)
                if name not in known and "**" not in known
            ]
    while CALL.search(advised):
        advised = CALL.sub(" ", advised)
    wrong += [f"{name}=" for name in OPTION.findall(advised) if name not in allowed]
    return wrong + [flag for flag in FLAG.findall(advised) if flag not in flags]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix()
)
def test_options_that_a_message_advises_are_there(path: Path) -> None:
    name = path.relative_to(SOURCE).as_posix()
    allowed = {*TORCH, *OTHERS, *OF_TRAINERS}
    for folder, options in {**ADAPTERS, **PARTS}.items():
        if name.startswith(folder):
            allowed |= options
    flags = {flag for command in COMMANDS for flag in flags_of(command)}
    command = re.fullmatch(r"cli/(\w+)_command\.py", name)
    if command is not None:
        flags = flags_of(command[1]) | ({"--json"} if command[1] == "report" else set())  # verify's
    wrong = {
        text: advice for text in messages(path) if (advice := wrong_advice(text, allowed, flags))
    }
    assert not wrong


def test_options_of_torch_that_are_advised_are_there() -> None:
    for name, call in OTHERS.items():
        assert name in inspect.signature(call).parameters, name


def test_wrong_advice_is_found() -> None:
    """The test above can fail: on the messages that it was written for."""
    allowed, flags = TORCH, flags_of("train")
    assert wrong_advice("not finite: pass nonfinite='skip'", allowed, flags) == ["nonfinite="]
    assert wrong_advice("it: say batch_size=100", allowed, flags) == ["batch_size="]
    assert wrong_advice("it: use wb.Close(skip=True)", allowed, flags) == ["wb.Close(skip=)"]
    assert wrong_advice("it: give --stairs", allowed, flags) == ["--stairs"]
    assert not wrong_advice("it: wb.Close(nonfinite='skip'), clip_norm=1", allowed, flags)
