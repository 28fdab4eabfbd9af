"""Certain fixes, applied with libcst so that the rest of the file stays unchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .check_file import check_source
from .findings import Edit, Finding
from .lint_settings import Settings
from .script_source import Source, notebook_source, read_source

__all__ = ["fix_files", "fix_text"]

_ROUNDS = 8


def fix_files(findings: Sequence[Finding], settings: Settings) -> tuple[int, str]:
    """Fix files in place; return how many findings were fixed, and an error message or ""."""
    try:
        import libcst  # noqa: F401
    except ImportError:
        return 0, "--fix needs libcst: pip install libcst"
    fixed = 0
    for path in dict.fromkeys(f.path for f in findings if f.fix):
        if path.endswith(".ipynb"):
            fixed += _fix_notebook(path, settings)
            continue
        source = read_source(path, max_bytes=settings.max_file_bytes)
        text, count = fix_text(source.text, settings, path=path)
        if count:
            raw = Path(path).read_bytes()
            newline = "\r\n" if b"\r\n" in raw else "\n"
            Path(path).write_bytes(text.replace("\n", newline).encode("utf-8"))
            fixed += count
    return fixed, ""


def fix_text(text: str, settings: Settings, *, path: str = "<source>") -> tuple[str, int]:
    """Apply one fix after another until none is left; return the text and how many."""
    count = 0
    for _ in range(_ROUNDS):
        findings = [f for f in check_source(Source(path, text), settings) if f.fix]
        if not findings:
            break
        changed = apply_edits(text, findings[0].fix)
        if changed is None or changed == text:
            break
        text = changed
        count += 1
    return text, count


def _fix_notebook(path: str, settings: Settings) -> int:
    """Apply the fixes whose edits all lie in one cell; return how many."""
    notebook: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    fixed = 0
    for _ in range(_ROUNDS):
        source = notebook_source(path, json.dumps(notebook).encode("utf-8"))
        for finding in check_source(source, settings):
            cells = {source.place(e.line)[0] for e in finding.fix}
            if not finding.fix or len(cells) != 1 or finding.cell is None:
                continue
            body = notebook["cells"][finding.cell - 1]["source"]
            text = "".join(body) if isinstance(body, list) else body
            moved = tuple(replace(e, line=source.place(e.line)[1]) for e in finding.fix)
            changed = apply_edits(text, moved)
            if changed is not None and changed != text:
                notebook["cells"][finding.cell - 1]["source"] = changed.splitlines(keepends=True)
                fixed += 1
                break
        else:
            break
    if fixed:
        Path(path).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return fixed


def apply_edits(text: str, edits: Sequence[Edit]) -> str | None:
    """Return the text with all edits applied, or None if one of them does not find its place."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper

    from .libcst_rewriter import Rewriter

    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError:
        return None
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    rewriter = Rewriter(edits, module.config_for_parsing)
    changed = wrapper.visit(rewriter)
    return changed.code if rewriter.complete else None
