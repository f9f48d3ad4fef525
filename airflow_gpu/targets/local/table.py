"""The daemon's table, as it is read every few seconds with thousands of jobs in it.

Purpose: read what has changed and nothing else. The file is not opened while
its time, size and inode stay the same. Where they changed, only the lines that
did are parsed, one by one: parsing four megabytes in one call would keep the
interpreter, and so the event loop of a triggerer, for a tenth of a second.

What it does not do: give rows away to be changed. They are shared between
calls, and between the threads that call.

Limits: rests on the daemon's writing one job a line; any other table is
parsed as a whole.

Example::

    table = Table(folder.table)
    table.rows()["job-1"]["native"]
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_gpu.targets.local.files import Damaged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEAD_END: Final = '"jobs": {'
"""How the first line of a table ends: what follows is one job a line, then the line ``}}``."""

Row = dict[str, Any]


class _Reading(NamedTuple):
    """One reading of the file: which file it was, its lines with their jobs' names and rows, and what is in it."""

    mark: tuple[int, ...]
    lines: Mapping[str, tuple[str, Row]]
    head: Mapping[str, Any]
    rows: Mapping[str, Row]


class Table:
    """The table at ``path``; keeps what it has read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # One object, so that two threads which read at once leave one reading and no mixture.
        self._kept = _Reading((), {}, {}, {})

    def rows(self) -> Mapping[str, Row]:
        """The rows by the names of their jobs. A row that is the same object as before has not changed.

        :raises Damaged: the table is not there or cannot be understood.
        """
        return self._read().rows

    def whole(self) -> dict[str, Any]:
        """The table as it is in the file, in a dict of the caller's own; the rows are shared.

        :raises Damaged: as above.
        """
        found = self._read()
        return {**found.head, "jobs": dict(found.rows)}

    def _read(self) -> _Reading:
        try:
            with self._path.open("rb") as file:
                # The folder's own file may be replaced in the meantime; this one is not.
                stat = os.fstat(file.fileno())
                mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                kept = self._kept
                if mark == kept.mark:
                    return kept
                text = file.read().decode()
        except FileNotFoundError:
            raise Damaged(f"{self._path} is missing") from None
        except UnicodeDecodeError as error:
            raise Damaged(f"{self._path} is not text: {error}") from None
        head, lines = self._parse(text, kept.lines)
        self._kept = found = _Reading(mark, lines, head, dict(lines.values()))
        return found

    def _parse(
        self, text: str, before: Mapping[str, tuple[str, Row]]
    ) -> tuple[dict[str, Any], dict[str, tuple[str, Row]]]:
        first, *body = text.rstrip("\n").split("\n")
        lines: dict[str, tuple[str, Row]] = {}
        if first.endswith(HEAD_END) and body and body.pop() == "}}":
            try:
                for line in body:
                    known = before.get(line)
                    lines[line] = known if known is not None else _row(line)
                head = json.loads(first + "}}")
                del head["jobs"]
                return head, lines
            except ValueError:
                pass
        try:
            head = json.loads(text)
            jobs = head.pop("jobs")
            return head, {name: (name, row) for name, row in jobs.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{self._path} cannot be understood: {error!r}") from None


def _row(line: str) -> tuple[str, Row]:
    [(name, row)] = json.loads("{" + line.removesuffix(",") + "}").items()
    if not isinstance(row, dict):
        raise ValueError(line)
    return name, row
