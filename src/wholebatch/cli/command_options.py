"""The options of a command, each declared once, as a field of the command's dataclass.

```python
@dataclass(frozen=True)
class PlanOptions:
    gpus: int = option(1, "N", "Data-parallel GPUs.", check=whole_number())

@command(PlanOptions)
def plan(options: PlanOptions) -> None: ...
```

The signature that typer reads is made from the fields, and every value is checked by its field.
Nothing here imports torch: a wrong option is refused at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from wholebatch.errors import OptionError

Check: TypeAlias = Callable[[Any, str], Any]
"""Takes a value and how it was given (`--steps`); returns it as it is meant, or refuses it."""


def option(
    default: Any,
    metavar: str | None,
    help: str,
    panel: str | None = None,
    *,
    flag: str | None = None,
    check: Check | None = None,
    **more: Any,
) -> Any:
    """Declare an option; `typed=` is its type on the command line, if the field's is another."""
    names = () if flag is None else (flag,)
    shown = typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)
    return field(default=default, metadata={"shown": shown, "flag": flag, "check": check, **more})


def argument(default: Any, metavar: str | None, help: str, *, check: Check | None = None) -> Any:
    """Declare an argument without a flag; `default` is MISSING where it must be given."""
    shown = typer.Argument(metavar=metavar, help=help, show_default=False)
    return field(default=default, metadata={"shown": shown, "flag": metavar, "check": check})


def recipe_argument(help: str, metavar: str = "RECIPE") -> Any:
    """Declare the argument that names a recipe; an empty name is not the default recipe."""

    def check(name: str, _: str) -> str:
        if not name.strip():  # a variable of a script that is not set
            from wholebatch.cli.recipes import load_recipe

            load_recipe(name)  # says which there are
        return name

    return argument(None, metavar, help, check=check)


def command(
    options: type, *, partial: bool = False
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Let a function be called by typer, with its options checked and in one dataclass.

    With `partial`, it gets a dict of the options that were typed, as they were typed: their
    defaults come from elsewhere.
    """

    def made(run: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def called(**typed: Any) -> None:
            if partial:
                run(
                    {
                        name: value
                        for name, value in typed.items()
                        if value is not None and value is not False
                    }
                )
            else:
                run(options(**_checked(options, typed)))

        called.__signature__ = _signature(options, partial)  # type: ignore[attr-defined]
        return called

    return made


def _signature(options: type, partial: bool) -> Signature:
    parameters, kinds = [], get_type_hints(options)
    for one in fields(options):
        if "shown" not in one.metadata:
            continue
        kind, default = one.metadata.get("typed") or kinds[one.name], one.default
        if default is MISSING:
            default = Parameter.empty
        elif partial and kind is not bool:
            kind, default = kind | None, None
        annotation = Annotated[kind, one.metadata["shown"]]  # type: ignore[valid-type]
        parameters.append(
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return Signature(parameters)


def _checked(options: type, typed: Mapping[str, Any]) -> dict[str, Any]:
    checked = dict(typed)
    for one in fields(options):
        check, value = one.metadata.get("check"), typed[one.name]
        if check is not None and value is not None:
            checked[one.name] = check(value, flag_of(one))
    return checked


def flag_of(one: Field[Any]) -> str:
    """Return an option as it is typed: `--batch-size`."""
    return one.metadata.get("flag") or "--" + one.name.replace("_", "-")


# ------------------------------------------------------------------------------------- checks


def must_be(allowed: str, test: Callable[[Any], bool]) -> Check:
    """Return a check that refuses what fails `test`, and says what is `allowed`."""

    def check(value: Any, label: str) -> Any:
        if not test(value):
            raise OptionError(f"{label} {value}: must be {allowed}")
        return value

    return check


def one_of(*names: str) -> Check:
    """Return a check for one of these names."""
    return must_be(f"one of {', '.join(names)}", lambda value: value in names)


def whole_number(least: int = 1) -> Check:
    """Return a check for a whole number."""

    def check(value: Any, label: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{label} {value}: must be a whole number, at least {least}")
        if value >= 1 << 63:  # torch's own limit for a seed; of anything else nobody has so many
            raise OptionError(f"{label} {value}: must be a whole number below 2**63")
        return value

    return check


def positive_number(value: Any, label: str) -> float:
    """Return a finite number above 0 as a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise OptionError(f"{label} {value}: must be a number above 0")
    return float(value)


def whole_numbers(allowed: str) -> Check:
    """Return a check for whole numbers above 0 with commas; it returns a list of them."""

    def check(value: str, label: str) -> list[int]:
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise OptionError(f"{label} {value}: must be {allowed}")
        return [int(part) for part in parts]

    return check
