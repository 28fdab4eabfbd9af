"""The libcst transformer behind `--fix`: delete, insert and replace at exact places."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst.metadata import PositionProvider

from .findings import Edit

__all__ = ["Rewriter"]

_Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class Rewriter(cst.CSTTransformer):
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
        if len(getattr(original, "body", ())) != 1 and isinstance(
            original, cst.SimpleStatementLine
        ):
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
