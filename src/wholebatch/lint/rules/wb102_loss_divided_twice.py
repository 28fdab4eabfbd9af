"""The loss is divided by the accumulation steps, and the framework divides it again.

Accelerate, Lightning, DeepSpeed and the transformers Trainer divide by themselves: the gradient is
K times too small. Leave the division to the framework.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.expressions import divisor_of, is_accumulation_name, text
from ..model.file_facts import Facts
from .rule_base import Report, framework_steps, rule

_DEEPSPEED = re.compile(r"deepspeed(?![^\n]*scale_wrt_gas)", re.I)
# What a configuration tells the engine: the number of micro-batches, or that it is 1.
_ENGINE_STEPS = re.compile(r"['\"]gradient_accumulation_steps['\"]\]?\s*[:=](?!=)\s*(1\b)?")


@rule("loss divided twice")
def check(file: File) -> Iterator[Report]:
    """Yield loops that divide where a framework does, and classes that do so inside one."""
    for window in file.accumulating:
        framework = _framework(window, file)
        yield from _by_hand(window, framework)
    yield from _in_classes(file)


def _framework(window: LoopWindow, file: File) -> str:
    if window.shape == "accelerate":
        return "Accelerate"
    details = {e.detail for e in window.backwards}
    if window.shape == "deepspeed":
        if _leaves_it_to_the_loop(file.facts) or _steps_once(window):
            return ""
        known = "deepspeed" in details or any("deepspeed" in i for i in file.facts.imports)
        return "DeepSpeed" if known else ""
    if details == {"accelerate"} and file.facts.accelerator_divides:
        return "Accelerate"
    return ""


def _by_hand(window: LoopWindow, framework: str) -> Iterator[Report]:
    seen: set[ast.AST] = set()
    # An engine's backward may be on another branch than the steps of the loop.
    engines = [e for e in window.inner if e.detail in {"deepspeed", "engine"}]
    chains = [(e, c) for e in engines for c in window.ways(e)]
    for event, chain in (*window.chains, *chains):
        counts = [d for d in chain.divisors if window.counts(d)]
        engine = event.detail in {"deepspeed", "engine"} and window.facts.mentions(_DEEPSPEED)
        engine = engine and not _leaves_it_to_the_loop(window.facts)
        # An engine that is only stepped at the boundary does not count micro-batches itself.
        engine = engine and not _steps_once(window)
        by = "DeepSpeed" if engine else framework
        if "scale_wrt_gas=False" in text(event.node):
            continue  # Told not to divide.
        if by and event.detail != "tensor" and counts and counts[0].node not in seen:
            seen.add(counts[0].node)
            yield Report(
                counts[0].node,
                f"loss is divided by `{counts[0].written}`, and {by} divides it again: "
                "leave the division to it",
            )
        elif len(counts) > 1 and counts[0].key == counts[1].key and counts[0].node not in seen:
            seen.add(counts[0].node)
            yield Report(
                counts[0].node, f"loss is divided by `{counts[0].written}` twice: divide it once"
            )


def _leaves_it_to_the_loop(facts: Facts) -> bool:
    """True if the configuration of an engine is found here, and all of it says 1."""
    told = _ENGINE_STEPS.findall(facts.source)
    return bool(told) and all(told)


def _steps_once(window: LoopWindow) -> bool:
    """True if the loop steps the engine once per window, and nothing here tells it their size."""
    steps = window.of("engine_step")
    once = window.shape == "boundary" and any(map(window.ends_window, steps))
    if window.shape != "boundary":
        steps += [e for e in window.after if e.kind == "engine_step"]
        depth = min((len(e.loops) for e in window.backwards), default=0)
        once = bool(steps) and all(len(e.loops) < depth for e in steps)
    return once and not window.facts.mentions(_ENGINE_STEPS)


def _in_classes(file: File) -> Iterator[Report]:
    for methods, framework in framework_steps(file):
        for node in ast.walk(methods[0]):
            by = divisor_of(node)
            if by is None or ".detach()" in text(node) or ".item()" in text(node):
                continue  # Not divided, or for a log.
            if is_accumulation_name(text(by)) or "accumulate" in text(by):
                yield Report(
                    node,
                    f"loss is divided by `{text(by)}`, and {framework} divides it again: leave the "
                    "division to it",
                )
                break
