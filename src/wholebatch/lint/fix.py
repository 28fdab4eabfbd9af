"""Certain fixes, applied with libcst so that the rest of the file stays unchanged."""

from __future__ import annotations

import io
import json
import os
import shutil
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from .check_files import Finding, check_source
from .lint_settings import Settings
from .rules.rule_base import Edit
from .source_files import Source, notebook_source, read_source

_ROUNDS = 8


def fix_files(findings: Sequence[Finding], settings: Settings, *, unsafe: bool = False) -> int:
    """Fix files in place; return how many findings were fixed."""
    fixed = 0
    for path in dict.fromkeys(f.path for f in findings if f.fix):
        if path.endswith(".ipynb"):
            fixed += _fix_notebook(path, settings, unsafe=unsafe)
            continue
        source = read_source(path, max_bytes=settings.max_file_bytes)
        text, count = fix_text(source.text, settings, path=path, unsafe=unsafe)
        if count:
            raw = Path(path).read_bytes()
            newline = "\r\n" if b"\r\n" in raw else "\n"
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            _replace(path, text.replace("\n", newline).encode(encoding))
            fixed += count
    return fixed


def diff_files(
    findings: Sequence[Finding], settings: Settings, *, unsafe: bool = False
) -> Iterator[str]:
    """Yield what `fix_files` would change in scripts, as unified diffs."""
    for path in dict.fromkeys(f.path for f in findings if f.fix and not f.path.endswith(".ipynb")):
        source = read_source(path, max_bytes=settings.max_file_bytes)
        fixed, _ = fix_text(source.text, settings, path=path, unsafe=unsafe)
        yield diff_text(path, source.text, fixed)


def diff_text(path: str, before: str, after: str) -> str:
    """Return the unified diff of one text."""
    lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return "".join(unified_diff(*lines, path, path))


def fix_text(
    text: str, settings: Settings, *, path: str = "<source>", unsafe: bool = False
) -> tuple[str, int]:
    """Apply one fix after another until none is left; return the text and how many."""
    count = 0
    for _ in range(_ROUNDS):
        found = check_source(Source(path, text), settings)
        findings = [f for f in found if f.fix and (unsafe or not f.unsafe)]
        if not findings:
            break
        changed = _apply_edits(text, findings[0].fix)
        if changed is None or changed == text:
            break
        text = changed
        count += 1
    return text, count


def _fix_notebook(path: str, settings: Settings, *, unsafe: bool) -> int:
    """Apply the fixes whose edits all lie in one cell; return how many."""
    notebook: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    fixed = 0
    for _ in range(_ROUNDS):
        source = notebook_source(path, json.dumps(notebook).encode("utf-8"))
        for finding in check_source(source, settings):
            cells = {source.place(e.line)[0] for e in finding.fix}
            if finding.unsafe and not unsafe:
                continue
            if not finding.fix or len(cells) != 1 or finding.cell is None:
                continue
            body = notebook["cells"][finding.cell - 1]["source"]
            text = "".join(body) if isinstance(body, list) else body
            moved = tuple(replace(e, line=source.place(e.line)[1]) for e in finding.fix)
            changed = _apply_edits(text, moved)
            if changed is not None and changed != text:
                notebook["cells"][finding.cell - 1]["source"] = changed.splitlines(keepends=True)
                fixed += 1
                break
        else:
            break
    if fixed:
        _replace(path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())
    return fixed


def _replace(path: str, content: bytes) -> None:
    """Replace a file, whole or not at all: on a full disk, the user's code is still there."""
    target = Path(path).resolve()
    temporary = target.with_name(f"{target.name}.writing-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _apply_edits(text: str, edits: Sequence[Edit]) -> str | None:
    """Return the text with all edits applied, or None if one cannot be applied."""
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError:
        return None
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    rewriter = _Rewriter(edits, module.config_for_parsing)
    changed = wrapper.visit(rewriter)
    return changed.code if rewriter.complete else None


_Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class _Rewriter(cst.CSTTransformer):
    """Applies edits by the line and column of the finding."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, edits: Sequence[Edit], config: cst.PartialParserConfig) -> None:
        super().__init__()
        self._edits = list(edits)
        self._config = config
        self._done: set[Edit] = set()

    @property
    def complete(self) -> bool:
        """True if every edit found its place; a partial fix is discarded."""
        return self._done == set(self._edits)

    def _here(self, node: cst.CSTNode, *actions: str) -> list[Edit]:
        start = self.get_metadata(PositionProvider, node).start
        return [
            e
            for e in self._edits
            if e.action in actions and (e.line, e.column) == (start.line, start.column)
        ]

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        """Delete statements, insert others beside them, or replace expressions."""
        if isinstance(original_node, cst.BaseExpression):
            return self._expression(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return self._statement(original_node, updated_node)
        return super().on_leave(original_node, updated_node)  # type: ignore[arg-type]

    def _expression(self, original: cst.BaseExpression, updated: cst.CSTNode) -> cst.CSTNode:
        for edit in self._here(original, "replace"):
            # Nested expressions can start at the same place: the kind tells them apart.
            if edit in self._done or type(original).__name__ != edit.kind:
                continue
            self._done.add(edit)
            return cst.parse_expression(edit.code, config=self._config)
        return updated

    def _statement(
        self, original: _Statement, updated: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        edits = self._here(original, "delete", "before", "after")
        if not edits:
            return updated
        assert isinstance(updated, cst.BaseStatement)
        if isinstance(original, cst.SimpleStatementLine) and len(original.body) != 1:
            return updated  # `a(); b()` on one line: not certain enough.
        lines: list[cst.BaseStatement] = [updated]
        for edit in edits:
            self._done.add(edit)
            if edit.action == "delete":
                lines.remove(updated)
                continue
            new = cst.parse_statement(edit.code, config=self._config)
            lines.insert(0, new) if edit.action == "before" else lines.append(new)
        return cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()
