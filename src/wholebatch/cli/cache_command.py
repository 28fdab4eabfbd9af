"""`wholebatch cache`: where compiled code is kept, its size, and how to remove it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from wholebatch.cli.command_options import command, option, positive_number


@dataclass(frozen=True)
class CacheOptions:
    """The options of `wholebatch cache`."""

    clear: bool = option(False, None, "Remove everything; it is compiled again when needed.")
    keep: float | None = option(
        None,
        "GIB",
        "Remove what was not used for longest until this much is left.",
        check=positive_number,
    )


@command(CacheOptions)
def cache(options: CacheOptions) -> None:
    """Show the disk cache of compiled code, or clear it: [bold]wholebatch cache --clear[/]."""
    from wholebatch.compile import disk_cache

    console = Console()
    freed = None
    if options.clear:
        freed = disk_cache.clear()
    elif options.keep is not None:
        freed = disk_cache.trim(int(options.keep * 2**30))
    if freed is not None:
        console.print(f"removed {_size(freed)}", highlight=False)
    for folder in disk_cache.cache_folders():
        number, size = folder.measured()
        console.print(
            f"{folder.name}: {_size(size)} in {number} files, {folder.path} ({folder.variable} "
            "moves it)",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
