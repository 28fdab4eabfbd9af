"""Dynamo's names of values, as the user would write them."""

from __future__ import annotations

import re
from typing import Any

MICRO_BATCH = "L['args'][1]"
_ARGUMENTS = {"L['args'][0]": "the model", MICRO_BATCH: "the micro-batch"}


def name_of(source: Any) -> str:
    """Return Dynamo's name of a source: an expression of Python."""
    name = source.name
    return str(name() if callable(name) else name)  # a property in newer versions of torch


_PATH = re.compile(r"[LG]\['[^']*'\](?:\.\w+|\[[^\]]*\])*")


def plain_name(path: str, loss: Any) -> str:
    """Return Dynamo's name of a value as the user would write it."""
    path = _with_free_name(path, loss)
    for prefix, name in _ARGUMENTS.items():
        if path.startswith(prefix):
            path = name + path.removeprefix(prefix)
    path = re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), path)
    path = re.sub(r"[LG]\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\._(?:parameters|buffers)\['(\w+)'\]", r".\1", path)
    path = re.sub(r"^(function\b.*|\w+)\.__self__", "self", path)  # of the user's own method
    path = path.replace("the micro-batch['micro']", "the micro-batch")
    return path.removeprefix("__main__.")


def value_and_line(part: str, loss: Any) -> str:
    """Return the value and the line of a guard's text: `G['beta'] == 1.0  # ...  # file:3 in f`."""
    path = _PATH.search(part)
    value = plain_name(path[0], loss) if path else part.split("#")[0].strip()
    line = re.search(r"# (?:\S*/)?(\S+\.py:\d+) in ", part)
    return f"{value} ({line[1]})" if line else value


_CELL = re.compile(r"\.__closure__\[(\d+)\]\.cell_contents")


def _with_free_name(path: str, loss: Any) -> str:
    """Put the name of a free variable for `function.__closure__[0].cell_contents`."""
    *_, cell = [None, *_CELL.finditer(path)]
    if cell is None:
        return path
    try:  # Dynamo's names are expressions of Python.
        function = eval(path[: cell.start()], {"L": {"function": loss}})
        return str(function.__code__.co_freevars[int(cell[1])]) + path[cell.end() :]
    except Exception:  # Of something that is not the loss function's.
        return path
