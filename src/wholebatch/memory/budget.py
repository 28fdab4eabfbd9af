"""The memory budget of a run, parsed from the user's `memory=` into bytes.

It is `"20GiB"`, `"512 MiB"`, `"80%"` or `0.8` of the device's memory, `"free"` for its free memory,
or a number of bytes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import nn

from wholebatch.errors import OptionError

Budget = int | float | str

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**k for k, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**k for k, p in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")


def parse_memory(
    memory: Budget,
    *,
    device: torch.device | str = "cpu",
    held: int = 0,
    processes: int = 1,
) -> int:
    """Return the bytes of a memory budget on a device.

    A size may also be of a GPU that is not in this machine. `held` is what the run itself already
    holds (the model): it is not free, but it is part of the budget. `processes` divide free memory,
    or a fraction: the ranks of one machine share its main memory.

    >>> parse_memory("1.5GiB"), parse_memory("512 MB"), parse_memory(4096)
    (1610612736, 512000000, 4096)
    """
    size, share = 0, memory if isinstance(memory, float) else None
    is_missing = torch.device(device).type == "cuda" and not torch.cuda.is_available()
    is_free = isinstance(memory, str) and memory.strip() == "free"
    if is_free and not is_missing:
        return free_memory(device) // processes + held
    if isinstance(memory, str) and not is_free:
        match = _SIZE.fullmatch(memory)
        number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
        size = int(number * _UNITS.get(unit, 0))
        if unit == "%" or (match and unit == "" and "." in match[1]):
            share = number / 100 if unit == "%" else number
    elif isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    if is_missing and (is_free or share is not None):
        raise OptionError(
            f"memory={memory!r}: there is no GPU here to take a share of: give a size"
        )
    if share is not None and 0 < share <= 1:
        return int(share * device_memory(device)) // processes
    if share is not None or size < 1:
        raise OptionError(
            f'memory={memory!r}: must be a size such as "20GiB", a share of the device such as '
            '"80%" or 0.8, "free" for what is free now, or a number of bytes'
        )
    return size


def has_room(nbytes: int, *, model: nn.Module, memory: Budget | None) -> bool:
    """True if a model's device has room for so many bytes beside activations and optimizer state.

    They may take half of what is free.
    """
    device = next(model.parameters()).device
    processes = sharing_processes(device, ranks=2)
    free = parse_memory("free" if memory is None else memory, device=device, processes=processes)
    if memory is not None:
        locals_of = (getattr(p, "to_local", lambda p=p: p)() for p in model.parameters())
        free -= sum(local.nbytes for local in locals_of)
    return 2 * nbytes <= free


def sharing_processes(device: torch.device | str, ranks: int) -> int:
    """Return the number of processes that share this device's memory (torchrun's, on a CPU)."""
    if ranks == 1 or torch.device(device).type != "cpu":
        return 1
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def device_memory(device: torch.device | str = "cpu") -> int:
    """Return the total memory of a device."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: torch.device | str) -> str:
    """Return the name of a GPU, or "cpu"."""
    device = torch.device(device)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else str(device)


def free_memory(device: torch.device | str = "cpu") -> int:
    """Return the memory that a run could allocate now, including PyTorch's cache."""
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None:  # Some of the calls below need an index.
            device = torch.device("cuda", torch.cuda.current_device())
        free, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)
        room = int(free + torch.cuda.memory_reserved(device) - own)
        # Respect torch.cuda.set_per_process_memory_fraction, if this torch can report it.
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        return min(room, max(0, int(share * device_memory(device)) - own))
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # Not Linux.
    return device_memory("cpu")


def limit_allocator(budget: int | None, device: torch.device) -> None:
    """Let CUDA's allocator refuse more than a budget, for this process, from now on."""
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
