"""`wholebatch completion`: the completion script of a shell, made from the commands' options."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass
from typing import Any

from wholebatch.cli.command_options import Command, argument, command, flag_of, one_of

_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class CompletionOptions:
    """The argument of `wholebatch completion`."""

    shell: str = argument(MISSING, "SHELL", "bash, zsh or fish.", check=one_of(*_SHELLS))


@command(
    CompletionOptions,
    "wholebatch completion bash >> ~/.bashrc",
    "wholebatch completion zsh >> ~/.zshrc",
    "wholebatch completion fish > ~/.config/fish/completions/wholebatch.fish",
)
def completion(options: CompletionOptions) -> None:
    """Print the completion script of bash, zsh or fish.

    It completes commands, options and their values. Print it again after an upgrade.
    """
    from wholebatch.cli.app import COMMANDS, load

    # `lint` parses its own options.
    commands = [one for name in COMMANDS if isinstance(one := load(name), Command)]
    print(_fish(commands, COMMANDS) if options.shell == "fish" else _bash(commands, options.shell))


def choices(one: Field[Any]) -> list[str]:
    """Return the values of an option that takes one of several words.

    >>> from dataclasses import fields
    >>> from wholebatch.cli.run_settings import Config
    >>> [choices(one) for one in fields(Config) if one.name in ("lr_rule", "steps")]
    [['none', 'linear', 'sqrt'], []]
    """
    words = (one.metadata["metavar"] or "").split("|")
    return words if len(words) > 1 and all(re.fullmatch(r"[a-z0-9-]+", w) for w in words) else []


def _flags(one: Command) -> list[Field[Any]]:
    return [each for each in one.shown if not each.metadata.get("positional")]


def _bash(commands: list[Command], shell: str) -> str:
    cases, values = [], []
    for one in commands:
        flags = " ".join(flag_of(each) for each in _flags(one))
        cases.append(f'    {one.name}) words="{flags} --help" ;;')
        for each in _flags(one):
            if found := choices(each):
                line = f'    "{one.name} {flag_of(each)}") words="{" ".join(found)}" ;;'
                values.append(line)
    load = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    names = " ".join(one.name for one in commands)
    return f"""{load}_wholebatch() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}} $before" in
{chr(10).join(values)}
  esac
  if [ -z "$words" ] && [ "${{current#-}}" != "$current" ]; then
    case "${{COMP_WORDS[1]}}" in
{chr(10).join("  " + case for case in cases)}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _wholebatch wholebatch"""


def _fish(commands: list[Command], about: dict[str, str]) -> str:
    lines = []
    for one in commands:
        lines.append(
            f"complete -c wholebatch -n __fish_use_subcommand -f -a {one.name} "
            f"-d '{_quoted(about[one.name])}'"
        )
        for each in _flags(one):
            values = f" -x -a '{' '.join(choices(each))}'" if choices(each) else ""
            needs = " -r" if each.metadata["metavar"] and not values else ""
            lines.append(
                f"complete -c wholebatch -n '__fish_seen_subcommand_from {one.name}' "
                f"-l {flag_of(each)[2:]}{needs}{values} -d '{_quoted(each.metadata['help'])}'"
            )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
