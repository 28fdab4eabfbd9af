"""Examples in docstrings as code on the documentation's site: an extension of griffe.

Docstrings here show `>>>` examples in the middle of their prose; Markdown would read them as
quotations. Each becomes a block of code.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension

__all__ = ["Examples", "fenced"]


def fenced(text: str) -> str:
    """The same text with a fence around every example, up to the empty line after it.

    >>> fenced("So:\\n\\n>>> 1 + 1\\n2\\n\\nDone.").split("\\n")
    ['So:', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'Done.']
    """
    lines: list[str] = []
    is_open = False
    for line in [*text.split("\n"), ""]:
        if not is_open and line.lstrip().startswith(">>> "):
            lines.append("```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line)
    return "\n".join(lines[:-1])


class Examples(Extension):
    """Called by griffe for everything that has a docstring."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
