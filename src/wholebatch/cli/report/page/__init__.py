"""The HTML page: runs, plans, tunings and verdicts in one file that works offline.

```python
from pathlib import Path
from wholebatch.cli.report.page import write_report

write_report([Path("runs/one"), Path("runs/two"), Path("tune.json")], Path("report.html"))
```
"""

from wholebatch.cli.report.page.elements import Callout, Chart, Page, Section, Table, Text
from wholebatch.cli.report.page.html import render, write_page
from wholebatch.cli.report.page.make_page import make_page, write_report
from wholebatch.cli.report.page.page_sources import Sources, read_sources

__all__ = [
    "Callout",
    "Chart",
    "Page",
    "Section",
    "Sources",
    "Table",
    "Text",
    "make_page",
    "read_sources",
    "render",
    "write_page",
    "write_report",
]
