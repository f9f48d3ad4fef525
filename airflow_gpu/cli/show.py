"""How commands speak: tables for people, one JSON object for machines, and spans of time.

Purpose: stdout has the answer (a table, or with ``--json`` one JSON object),
stderr has progress and errors. So a pipe gets the answer and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def out() -> Console:
    """Where answers go. A pipe has no width of its own: rows are not to be cut there."""
    return Console(width=None if sys.stdout.isatty() else 200)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(body: Any) -> None:
    """One JSON object."""
    print(json.dumps(body, indent=1, ensure_ascii=False, default=str), flush=True)


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column, overflow="fold", no_wrap=column in ("STATE", "LIFE", "TRY", "SINCE", "STEP", "RESULT")
        )
    return made


def cell(text: Any) -> str:
    """Text from outside, which must not be taken for markup."""
    return escape(str(text)) if text not in (None, "") else "-"


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago, in one unit: ``3 h``."""
    if not at:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    for size, unit in SPANS:
        if seconds >= 2 * size or size == 1:
            return f"{seconds / size:.0f} {unit}"
    return "0 s"
