"""What the captured code writes outside of itself, by Dynamo's record of side effects."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wholebatch.compile.source_names import MICRO_BATCH, name_of, plain_name


def written_by_code(effects: Any, loss: Any) -> str | None:
    """Return the name of something that the code changes, and does not change back."""
    for variable in effects._get_modified_vars():
        kind = type(variable.mutation_type).__name__
        if not kind.endswith("Existing"):
            continue  # The code has made it itself.
        source = getattr(variable, "source", None)
        path = "" if source is None else name_of(source)
        if _ends_as_it_was(variable, may_lack=path.startswith(MICRO_BATCH)):
            continue
        name = plain_name(path, loss) if path else "a variable"
        changed = effects.store_attr_mutations.get(variable, {})
        if not changed:
            return name  # A container, whose values may be any.
        owner = getattr(variable, "value", None)
        fields = [field for field, to in changed.items() if not _is_as_before(owner, field, to)]
        if fields:
            return f"{name}.{fields[0]}" if hasattr(owner, "__dict__") else name
    return None


def _ends_as_it_was(variable: Any, *, may_lack: bool) -> bool:
    """True if this dictionary holds what was in it, or (`may_lack`) a part of that.

    `micro.pop("labels")` changes nothing: the next micro-batch has its own.
    """
    items, before = (getattr(variable, name, None) for name in ("items", "original_items"))
    if not isinstance(items, dict) or not isinstance(before, dict):
        return False
    if not may_lack and len(items) < len(before):
        return False
    held = [(before.get(getattr(key, "vt", key)), value) for key, value in items.items()]
    return all(was is not None and _is_same(was.unwrap(), value.unwrap()) for was, value in held)


def _is_same(before: Any, now: Any) -> bool:
    """True for one variable of Dynamo's, and for two that stand for one module."""
    module = getattr(before, "value", None)
    is_module = isinstance(module, nn.Module) and module is getattr(now, "value", None)
    return before is now or is_module


_MISSING = object()


def _is_as_before(owner: Any, field: str, value: Any) -> bool:
    """True if this attribute ends as it began."""
    before = getattr(owner, field, _MISSING)
    if type(value).__name__ == "DeletedVariable":
        return field not in getattr(owner, "__dict__", ())  # It was put there, and taken away.
    if value.is_python_constant():
        now = value.as_python_constant()
        return bool(type(now) is type(before) and now == before)
    return isinstance(before, Tensor) and _is_same_tensor(value, before)


def _is_same_tensor(value: Any, before: Tensor) -> bool:
    """True for `x` and for `x.to(...)` where that changes nothing."""
    node = value.as_proxy().node if hasattr(value, "proxy") else None
    fake = None if node is None else node.meta.get("example_value")
    while node is not None and node.op == "call_method" and node.target in ("to", "contiguous"):
        node = node.args[0]
        if node.meta.get("example_value") is not fake:
            return False
    argument = None if node is None else node.meta.get("grapharg")
    if argument is None or name_of(argument.source).startswith(MICRO_BATCH):
        return False  # The next one is another.
    return argument.example is before
