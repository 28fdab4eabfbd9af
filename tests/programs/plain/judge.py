"""One text, three judges: lint reads it, verify runs it, and the undivided batch decides."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tests.programs.frame import Judged, Machine
from tests.programs.plain.grammar import LIBRARIES, draw, label, smaller
from tests.programs.plain.loop import Loop
from tests.programs.plain.mistakes import BESIDE, MISTAKES
from tests.programs.plain.oracle import Recorder, difference, undivided
from tests.programs.plain.text import imports, script
from tests.programs.run import in_fork, run_as_main
from tests.programs.run import warm_up as machine_warm_up

_LIMIT = 60.0
"""Seconds of CPU time for one run of a loop."""
NO_ERROR = ("note", "speed", "log")
"""Levels of a finding of lint with which a commit passes."""


@dataclass(frozen=True)
class Answers:
    """What the three judges say of a text."""

    is_right: bool
    """What the undivided batch says."""
    distance: str
    """The first difference from it, in words."""
    verdict: str
    """"same", "wrong" or "not judged"."""
    causes: tuple[str, ...]
    line: str
    errors: tuple[str, ...]
    """The codes of lint's errors."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """Whether the judges agree; `failure` is the same for the same defect."""

    loop: Loop
    answers: Answers | None
    failure: str = ""
    detail: str = ""


def judge(loop: Loop) -> Judgement:
    """Write the loop down, and ask the three judges."""
    text = script(loop)
    right = _in_fork(lambda: undivided(loop))
    steps = _on_ranks(loop.ranks, lambda: _recorded(text))
    watched = _on_ranks(loop.ranks, lambda: _watched(text))
    for judged, name in ((right, "oracle"), (steps, "loop"), (watched, "verify")):
        if isinstance(judged, str):
            return Judgement(loop, None, f"{name} broken: {_last_line(judged)}", judged)
    is_beside = loop.mistake in BESIDE
    distance = "planted beside the step" if is_beside else difference(right, steps)
    errors, notes = linted(text)
    answers = Answers(not distance, distance, *watched, errors, notes)
    return Judgement(loop, answers, contradiction(loop, answers), _told(answers))


def contradiction(loop: Loop, answers: Answers) -> str:
    """Return what the judges disagree in; empty if they agree."""
    planted = loop.mistake
    if planted == "none" and loop.of.is_right and not answers.is_right:
        return f"grammar: a loop meant to be right is not: {_plain(answers.distance)}"
    of = planted if planted != "none" else loop.task if not loop.of.is_right else ""
    if answers.is_right and not of:
        if answers.verdict == "wrong":
            return f"verify: right loop called Wrong ({', '.join(answers.causes)})"
        if answers.errors:
            return f"lint: error on a right loop ({', '.join(answers.errors)})"
    if not answers.is_right and answers.verdict == "same":
        return f"verify: {of} called same"
    if answers.errors and answers.verdict == "same":
        return f"contradiction: lint {', '.join(answers.errors)}, verify same ({of})"
    return ""


def is_named(judgement: Judgement) -> bool:
    """True if verify names a cause that fits the mistake."""
    answers, mistake = judgement.answers, MISTAKES.get(judgement.loop.mistake)
    return bool(answers and mistake and set(answers.causes) & set(mistake.causes))


def is_linted(judgement: Judgement) -> bool:
    """True if lint gives an error or a note of a rule that fits the mistake."""
    answers, mistake = judgement.answers, MISTAKES.get(judgement.loop.mistake)
    told = {*answers.errors, *answers.notes} if answers else set[str]()
    return bool(mistake and told & set(mistake.codes))


def judged(loop: Loop) -> Judged:
    """Judge a loop, for the table of a search."""
    judgement = judge(loop)
    answers = judgement.answers
    columns = [answers.verdict if answers else "broken"]
    columns += ["named"] * is_named(judgement) + ["linted"] * is_linted(judgement)
    columns += ["lint errors"] * bool(answers and answers.errors)
    return Judged(loop, label(loop), tuple(columns), judgement.failure, judgement.detail)


def machine() -> Machine:
    """Return the grammar of loops in plain torch, judged by lint and verify, too."""
    warm_up(LIBRARIES)
    return Machine(draw, judged, smaller, script)


def linted(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the codes of lint's errors, and of its notes."""
    from wholebatch.lint import lint_source

    findings = lint_source(text, path="train.py")
    errors = dict.fromkeys(f.code for f in findings if f.level not in NO_ERROR)
    notes = dict.fromkeys(f.code for f in findings if f.level in NO_ERROR)
    return tuple(errors), tuple(notes)


def _on_ranks(ranks: int, function: Callable[[], Any]) -> Any:
    """Return the function's result on rank 0, which meets the other ranks over gloo."""
    if ranks == 1:
        return _in_fork(function)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def on(rank: int) -> Any:
        meet = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in meet.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        result = function()
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    with ThreadPoolExecutor(ranks) as threads:
        results = [*threads.map(lambda rank: _in_fork(lambda: on(rank)), range(ranks))]
    return next((result for result in results if isinstance(result, str)), results[0])


def _in_fork(function: Callable[[], Any]) -> Any:
    """Return the function's result, computed in a fork; or its traceback."""

    def guarded() -> Any:
        try:
            return function()
        except Exception:
            return traceback.format_exc()

    return in_fork(guarded, _LIMIT)


def warm_up(libraries: Sequence[str] = ("torch",)) -> None:
    """Import what the loops of these libraries import, so that every fork has it already."""
    for library in libraries:
        exec(imports(Loop(library=library)), {})
    machine_warm_up(script(Loop(amp="scaler")), "import wholebatch.lint, wholebatch.verification")


def _recorded(text: str) -> Any:
    """Run the text in float64, and return its steps."""
    import torch

    torch.set_default_dtype(torch.float64)
    with Recorder() as recorder:
        error = run_as_main(text)
    return error or recorder.steps


def _watched(text: str) -> Any:
    """Run the text under a watch, and return verdict, causes and line."""
    import wholebatch as wb

    with wb.watch() as watched:
        error = run_as_main(text)
    verdict = watched.verdict
    said = "same" if verdict.same else "wrong" if verdict.judged else "not judged"
    return error or (said, tuple(verdict.mistakes), verdict.line)


def _told(answers: Answers) -> str:
    return (
        f"oracle: {answers.distance or 'right'}\nverify: {answers.line}\n"
        f"lint: errors {', '.join(answers.errors) or 'none'}, notes "
        f"{', '.join(answers.notes) or 'none'}"
    )


def _plain(words: str) -> str:
    return re.sub(r"[-+.\de]*\d[-+.\de]*", "#", words)


def _last_line(text: str) -> str:
    return _plain(text.strip().splitlines()[-1])[:90]
