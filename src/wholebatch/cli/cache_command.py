"""`wholebatch cache`: where compiled code is kept, its size, and how to remove it."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.cli.command_options import command, option, positive_number, switch
from wholebatch.cli.report.terminal_output import Spinner, console_of, say
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import bytes_said


@dataclass(frozen=True)
class CacheOptions:
    """The options of `wholebatch cache`."""

    clear: bool = switch("Remove everything. It is compiled again when needed.")
    keep: float | None = option(
        None, "GIB", "Remove the oldest files until this much is left.", check=positive_number
    )


@command(CacheOptions, "wholebatch cache", "wholebatch cache --keep 5", "wholebatch cache --clear")
def cache(options: CacheOptions) -> None:
    """Show the disk cache of compiled code, or clear it."""
    if options.clear and options.keep is not None:
        raise OptionError("--clear with --keep: give one of them; --clear removes everything")
    console = console_of()
    with Spinner(console) as doing:
        doing("importing torch")
        from wholebatch.compile import disk_cache

    freed = None
    if options.clear:
        freed = disk_cache.clear()
    elif options.keep is not None:
        freed = disk_cache.trim(int(options.keep * 2**30))
    if freed is not None:
        say(console, f"removed {bytes_said(freed)}")
    for folder in disk_cache.cache_folders():
        number, size = folder.measured()
        say(console, f"{folder.name}: {bytes_said(size)} in {number} files")
        say(console, f"{folder.path} ({folder.variable} moves it)", indent=2)
