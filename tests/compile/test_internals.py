"""The private parts of torch that the engine uses are in this torch, and there are few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wholebatch.compile import torch_internals

HOME = Path(torch_internals.__file__).parent


@pytest.mark.filterwarnings("ignore")
def test_this_torch_has_them() -> None:
    assert torch_internals.missing() == []
    assert len(torch_internals.INTERNALS) <= 25


def test_every_private_module_of_torch_is_listed() -> None:
    known = {one.module for one in torch_internals.INTERNALS}
    known |= {f"{one.module}.{one.name}" for one in torch_internals.INTERNALS}
    used = set()
    for path in (*HOME.glob("*.py"), *(HOME.parent / "offload").glob("*.py")):
        if path.name != "torch_internals.py":
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"^\s*from (torch[\w.]*\._[\w.]+) import", text, re.M))
    unlisted = {one for one in used if not any(name.startswith(one) for name in known)}
    assert unlisted <= {"torch._inductor.runtime.hints", "torch._inductor.utils"}  # with choices
