"""The options of a command, each declared once, as a field of the command's dataclass.

```python
@dataclass(frozen=True)
class PlanOptions:
    gpus: int = option(1, "N", "Data-parallel GPUs.", check=whole_number())

@command(PlanOptions, "wholebatch plan --gpus 8")
def plan(options: PlanOptions) -> None: ...
```

The fields become the arguments of an `argparse` parser, and every value is checked by its field.
Nothing here imports torch or rich: help and a wrong option are on the screen at once.
"""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from wholebatch.errors import OptionError

Check: TypeAlias = Callable[[Any, str], Any]
"""Takes a value and how it was given (`--updates`); returns it as it is meant, or refuses it."""


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
    shown = {"metavar": metavar, "help": help, "panel": panel, "flag": flag, "check": check}
    return field(default=default, metadata={**shown, **more})


def choice(names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option that takes one of these names, `auto|cpu`; the first is the default."""
    words = names.split("|")
    return option(more.pop("default", words[0]), names, help, panel, check=one_of(*words), **more)


def switch(help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option without a value, off unless given."""
    return option(False, None, help, panel, **more)


def argument(default: Any, metavar: str, help: str, *, check: Check | None = None) -> Any:
    """Declare an argument without a flag; `default` is MISSING where it must be given."""
    return option(default, metavar, help, flag=metavar, check=check, positional=True)


def recipe_argument(help: str, metavar: str = "RECIPE") -> Any:
    """Declare the argument that names a recipe; a name that there is not is refused at once."""

    def check(name: str, _: str) -> str:
        from wholebatch.cli.recipe_files import find_recipe  # not for --help

        if not name.startswith("hf:"):
            find_recipe(name)
        return name

    return argument(None, metavar, help, check=check)


@dataclass(frozen=True)
class Command:
    """A command: the dataclass of its options, its examples, and the function that runs it."""

    options: type
    examples: tuple[str, ...]
    run: Callable[[Any], int | None]
    partial: bool = False

    @property
    def name(self) -> str:
        """The word after `wholebatch`."""
        return self.run.__name__

    @property
    def shown(self) -> Iterator[Field[Any]]:
        """The fields that are options or arguments of the command line."""
        return (option for option in fields(self.options) if "help" in option.metadata)

    def __call__(self, arguments: Sequence[str]) -> int:
        """Parse the arguments, run the command and return its exit status."""
        typed = self.parse(arguments)
        if self.partial:
            return self.run(typed) or 0
        # Last, what must be given: a wrong value is told first.
        for option in sorted(fields(self.options), key=lambda option: option.default is MISSING):
            check, value = option.metadata.get("check"), typed.get(option.name, option.default)
            if value is MISSING:
                help, name = option.metadata["help"].rstrip("."), flag_of(option).rstrip(".")
                raise OptionError(f"give at least one {name}: {help[0].lower()}{help[1:]}")
            if check is not None and value is not None:
                typed[option.name] = check(value, flag_of(option))
        return self.run(self.options(**typed)) or 0

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser, which also prints the help."""
        width = min(100, shutil.get_terminal_size().columns)
        positional = [f"[{flag_of(it)}]" for it in self.shown if it.metadata.get("positional")]
        about = [textwrap.fill(it, width) for it in _paragraphs(self.run.__doc__ or "")]
        parser = _Parser(
            prog=f"wholebatch {self.name}",
            usage=" ".join([f"wholebatch {self.name}", *positional, "[options]"]),
            description="\n\n".join(about),
            epilog="examples:\n" + "\n".join(f"  {example}" for example in self.examples),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width),
            allow_abbrev=False,
        )
        panels: dict[str | None, Any] = {None: parser}
        kinds = get_type_hints(self.options)
        for option in self.shown:
            panel = option.metadata["panel"]
            if panel not in panels:
                panels[panel] = parser.add_argument_group(panel)
            _add(panels[panel], option, *_kind(option, kinds))
        return parser

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the value of every option that was typed, in its type."""
        by_name, kinds = (
            {option.name: option for option in self.shown},
            get_type_hints(self.options),
        )
        own, rest = self._own(arguments)
        typed, unknown = self.parser().parse_known_intermixed_args([*own])
        if unknown:
            what = "no such option: " if unknown[0].startswith("-") else "unexpected argument: "
            close = get_close_matches(unknown[0], map(flag_of, self.shown), n=1)
            meant = f"did you mean {close[0]}?" if close else "see --help"
            raise OptionError(f"{what}{unknown[0]} ({meant})")
        values = {name: text for name, text in vars(typed).items() if text not in (None, [])}
        return rest | {
            name: _converted(by_name[name], text, _kind(by_name[name], kinds)[0])
            for name, text in values.items()
        }

    def _own(self, arguments: Sequence[str]) -> tuple[Sequence[str], dict[str, Any]]:
        """Return the arguments before an option that takes all that follow it, and those."""
        for option in self.shown:
            flag = flag_of(option)
            if option.metadata.get("takes_rest") and flag in arguments:
                place = arguments.index(flag)
                if place + 1 == len(arguments):
                    raise OptionError(f"{flag}: needs a value (see --help)")
                return arguments[:place], {option.name: tuple(arguments[place + 1 :])}
        return arguments, {}


def command(
    options: type, *examples: str, partial: bool = False
) -> Callable[[Callable[[Any], int | None]], Command]:
    """Make a command of a function that takes its options, checked, in one dataclass.

    With `partial`, it gets a dict of the options that were typed, as they were typed: their
    defaults come from elsewhere.
    """
    return lambda run: Command(options, examples, run, partial)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "needs a value")
        message = message.replace("ignored explicit argument", "takes no value, but was given")
        raise OptionError(f"{message} (see --help)")


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.strip().split("\n\n")]


def _kind(option: Field[Any], kinds: dict[str, Any]) -> tuple[type, bool]:
    """Return the type of one value of an option, and True if it may be given several times."""
    hint = option.metadata.get("typed") or kinds[option.name]
    parts = [part for part in get_args(hint) if part is not NoneType] or [hint]
    if get_origin(hint) is list:
        return parts[0], True
    if get_origin(parts[0]) is list:
        return get_args(parts[0])[0], True
    return parts[0], False


def _add(group: Any, option: Field[Any], kind: type, many: bool) -> None:
    """Add the argument of a field; defaults are filled in after parsing."""
    default, metavar = option.default, option.metadata["metavar"]
    help = option.metadata["help"].replace("%", "%%")
    is_plain = default not in (None, (), MISSING) and not isinstance(default, bool)
    if is_plain and "stored" not in option.metadata:
        help += f" [default: {default}]"
    if option.metadata.get("positional"):
        group.add_argument(option.name, nargs="*" if many else "?", metavar=metavar, help=help)
    elif kind is bool:
        flag = flag_of(option)
        group.add_argument(flag, dest=option.name, action="store_const", const=True, help=help)
    else:
        action = "append" if many else "store"
        group.add_argument(
            flag_of(option), dest=option.name, action=action, metavar=metavar, help=help
        )


def _converted(option: Field[Any], text: Any, kind: type) -> Any:
    if isinstance(text, list):
        return [_converted(option, part, kind) for part in text]
    flag = flag_of(option)
    if text == "" and (kind is Path or option.metadata["check"] is None):
        raise OptionError(f'{flag} "": is empty; give a value (a variable that is not set?)')
    try:
        return text if kind is bool else kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise OptionError(f"{flag} {text}: must be {wanted} (see --help)") from None


def flag_of(option: Field[Any]) -> str:
    """Return an option as it is typed: `--batch-size`."""
    return option.metadata.get("flag") or f"--{option.name.replace('_', '-')}"


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


def whole_number(least: int = 1, most: int = 2**63 - 1) -> Check:
    """Return a check for a whole number; torch takes no seed above 2**63 - 1."""

    def check(value: Any, label: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{label} {value}: must be a whole number, at least {least}")
        if value > most:
            raise OptionError(f"{label} {value}: must be a whole number, at most {most:,}")
        return value

    return check


def positive_number(value: Any, label: str) -> float:
    """Return a finite number above 0 as a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise OptionError(f"{label} {value}: must be a number above 0")
    return float(value)


def with_commas(
    read: Callable[[str], Any], allowed: str, *, least: int = 1, most: int = 10**6
) -> Check:
    """Return a check for a list with commas; `read` raises a ValueError for a wrong part."""

    def check(value: str, label: str) -> list[Any]:
        try:
            values = [read(part.strip()) for part in value.split(",") if part.strip()]
        except ValueError:
            values = []
        if not least <= len(values) <= most:
            raise OptionError(f"{label} {value}: must be {allowed}")
        return values

    return check


def count_of(text: str) -> int:
    """Return a whole number above 0, or raise a ValueError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(text)
    return int(text)
