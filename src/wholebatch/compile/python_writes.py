"""What the captured code writes outside of itself, by Dynamo's record of side effects."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wholebatch.compile.source_names import MICRO_BATCH, name_of, plain_name


def written_by_code(effects: Any, loss: Any) -> str | None:
    """Return the name of something that the code changes, and does not change back."""
    for variable in effects._get_modified_vars():
        kind = type(variable.mutation_type).__name__
        if not kind.endswith("Existing"):
            continue  # The code has made it itself.
        source = getattr(variable, "source", None)
        path = "" if source is None else name_of(source)
        if path.startswith(MICRO_BATCH) and _only_removes(variable):
            continue  # `micro.pop("labels")`: the next one has its own.
        name = plain_name(path, loss) if path else "a variable"
        changed = effects.store_attr_mutations.get(variable, {})
        if not changed:
            return name  # A container, whose values may be any.
        owner = getattr(variable, "value", None)
        fields = [field for field, to in changed.items() if not _is_as_before(owner, field, to)]
        if fields:
            return f"{name}.{fields[0]}" if hasattr(owner, "__dict__") else name
    return None


def _only_removes(variable: Any) -> bool:
    """True if nothing is left in this dictionary but what was in it."""
    items, before = (getattr(variable, name, None) for name in ("items", "original_items"))
    if not isinstance(items, dict) or not isinstance(before, dict):
        return False
    kept = [(before.get(getattr(key, "vt", key)), value) for key, value in items.items()]
    return all(was is not None and was.unwrap() is value.unwrap() for was, value in kept)


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
