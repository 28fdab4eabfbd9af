"""A page whose diff is a whole script, and an example, before the change and after it."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
MOST_LINES = 5


def scripts_of(page: Path, index: int = 0) -> tuple[str, str]:
    """The page's diff as two scripts, before and after; it changes at most five lines."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[index].splitlines()
    changed = [line for line in lines if line[:1] in ("-", "+")]
    assert len(changed) <= MOST_LINES, f"{page}: {len(changed)} lines change: {changed}"
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before, after


def run_diff(page: Path, index: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script leaves behind before the change, and after it."""
    left: list[dict[str, Any]] = []
    for side, code in zip(("before", "after"), scripts_of(page, index), strict=True):
        namespace: dict[str, Any] = {"__name__": f"{page.stem} {side}"}
        exec(compile(code, f"{page.name} {side}", "exec"), namespace)
        left.append(namespace)
    return left[0], left[1]


def assert_example_shows_the_change(name: str) -> None:
    """Run an example; it prints how far its update is off before the change, and after it."""
    path = EXAMPLES / f"{name}.py"
    described = path.read_text(encoding="utf-8").split('"""')[1]
    assert {"-", "+"} == set(re.findall(r"^    ([+-]) .*$", described, re.M))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    last = printed.getvalue().splitlines()[-1]
    found = re.search(r"off by (\d+)% (?:in|with) .*, by (\S+) with", last)
    assert found is not None
    assert int(found[1]) > 10
    assert float(found[2]) < 1e-5
