"""The picture of a run over time: attempts and lives as bars, on one axis.

Purpose: computes where everything is; ``templates/timeline.html`` draws it as
SVG. Pure.

Reading it: one row an attempt. The pale bar is the attempt, from its journal
entry to its end; the solid ones are its lives, coloured by how they ended.
Marks: a notice, a stop, a preemption (or another loss), a complete checkpoint.

Limits: the axis is linear; the newest ``ROWS`` attempts are drawn; marks of a
kind closer than ``MARK_GAP`` are drawn as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow_gpu.gang.entries import seconds

WIDTH, LEFT, RIGHT, TOP, ROW, AXIS = 1000.0, 150.0, 24.0, 26.0, 40.0, 34.0
BAR = 18.0
"""Height of a life's bar."""

ROWS = 40
MARK_GAP = 7.0
MARKED_BAR = 22.0
"""Width from which a bar gets the mark of its loss; a thinner one would be hidden by it, and has its colour."""

LEAST = 3.0
"""Width of a bar that would be too thin to see or to point at."""

TICKS = 7
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_INFRA_MARKS = {"node lost": "a node was lost", "preempted": "preempted"}


@dataclass
class Picture:
    """Shapes in user units of a drawing of ``width`` x ``height``."""

    width: float
    height: float
    left_out: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    ticks: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # tones and marks that occur, for the legend
    caption: str = ""


def draw(view: Mapping[str, Any]) -> Picture | None:
    """The picture of a view; None when there is nothing to draw yet."""
    attempts: Sequence[Mapping[str, Any]] = view["attempts"][-ROWS:]
    if not attempts:
        return None
    now = seconds(view["read_at"])
    begin = seconds(attempts[0]["started"])
    owners = [owner for owner in view["owners"] if seconds(owner["at"]) >= begin]
    end = max(
        [seconds(one["ended"]) if one["ended"] else now for one in attempts]
        + [seconds(o["at"]) for o in owners]
    )
    if view["verdict"]:
        end = max(end, seconds(view["verdict"]["at"]))
    axis = _Axis(begin, end)
    picture = Picture(WIDTH, TOP + ROW * len(attempts) + AXIS, len(view["attempts"]) - len(attempts))
    for i, attempt in enumerate(attempts):
        _attempt(picture, axis, attempt, TOP + ROW * i, now)
    _owners(picture, axis, owners)
    if not view["verdict"] and view["attempts"][-1]["ended"] is None:
        picture.lines.append({"x": axis.x(now), "kind": "now", "label": "now"})
    picture.ticks = axis.ticks()
    found = {bar["tone"] for bar in picture.bars} | {mark["kind"] for mark in picture.marks}
    order = ("good", "bad", "infra", "stop", "run", "idle", "checkpoint", "notice", "lost", "stopped")
    picture.kinds = [kind for kind in order if kind in found]
    count = len(view["attempts"])
    picture.caption = f"{count} attempt{'' if count == 1 else 's'} over {span(end - begin)}"
    return picture


class _Axis:
    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.length = max(end - begin, 1.0)

    def x(self, at: float) -> float:
        share = min(1.0, max(0.0, (at - self.begin) / self.length))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self) -> list[dict[str, Any]]:
        step = next((one for one in _STEPS if self.length / one <= TICKS), None)
        if step is None:
            step = 86400 * math.ceil(self.length / 86400 / TICKS)
        first = math.ceil(self.begin / step) * step
        ticks, day = [], ""
        for n in range(TICKS + 1):
            at = first + n * step
            if at > self.begin + self.length:
                break
            moment = datetime.fromtimestamp(at, UTC)
            label = moment.strftime("%H:%M:%S" if step < 60 else "%H:%M")
            date = moment.strftime("%d %b")
            ticks.append({"x": self.x(at), "label": label, "date": date if date != day else ""})
            day = date
        return ticks


def _attempt(picture: Picture, axis: _Axis, attempt: Mapping[str, Any], top: float, now: float) -> None:
    number, middle = attempt["attempt"], top + ROW / 2
    begin = axis.x(seconds(attempt["started"]))
    end = axis.x(seconds(attempt["ended"]) if attempt["ended"] else now)
    picture.rows.append(
        {"y": middle, "top": top, "label": f"attempt {number}", "target": _cut(attempt["target"], 22)}
    )
    state = attempt["cause_words"] or "not over"
    picture.bars.append(
        _bar(begin, end, middle, 6.0, "wait", f"attempt {number} on {attempt['target']}: {state}", "")
    )
    lives = attempt["lives"]
    for i, life in enumerate(lives):
        start = axis.x(seconds(life["started"]))
        stop = axis.x(seconds(life["ended"] or life["seen"]))
        since = f"from step {life['from']['step']}" if life["from"] else "from the beginning"
        title = f"life {life['life']}, {since}: {life['word']}, {span(seconds(life['ended'] or life['seen']) - seconds(life['started']))}"
        label = (
            f"life {life['life']}" if stop - start > 46 else str(life["life"]) if stop - start > 16 else ""
        )
        picture.bars.append(_bar(start, stop, middle, BAR, life["tone"], title, label))
        _checkpoints(picture, axis, life, middle)
        if life["notice"]:
            _mark(
                picture,
                axis.x(seconds(life["notice"])),
                middle - BAR / 2 - 5,
                "notice",
                f"life {life['life']}: had notice",
            )
        if life["ended"] and life["tone"] == "infra" and stop - start >= MARKED_BAR:
            last = i + 1 == len(lives)
            why = _INFRA_MARKS.get(life["word"], life["word"]) + (
                f", {attempt['detail']}" if last and attempt["detail"] else ""
            )
            _mark(picture, stop, middle, "lost", f"life {life['life']}: {why}")
    if attempt["ended"] and attempt["tone"] == "infra" and not lives:
        _mark(picture, end, middle, "lost", f"attempt {number}: {attempt['cause_words']}")
    if attempt["stop"]:
        told = attempt["stop"]
        _mark(
            picture,
            axis.x(seconds(told["at"])),
            middle,
            "stopped",
            f"asked to end ({told['reason']}): {told['detail']}",
        )


def _checkpoints(picture: Picture, axis: _Axis, life: Mapping[str, Any], middle: float) -> None:
    for checkpoint in life["checkpoints"]:
        if checkpoint["complete"] and checkpoint["at"]:
            x = axis.x(seconds(checkpoint["at"]))
            title = f"checkpoint of life {life['life']} at step {checkpoint['step']}"
            _mark(picture, x, middle + BAR / 2 + 5, "checkpoint", title)


def _owners(picture: Picture, axis: _Axis, owners: Sequence[Mapping[str, Any]]) -> None:
    for owner in owners:
        if owner["reason"] == "start":
            continue
        picture.lines.append(
            {
                "x": axis.x(seconds(owner["at"])),
                "kind": "owner",
                "label": f"try {owner['try']} ({owner['reason']})",
            }
        )


def _bar(
    begin: float, end: float, middle: float, height: float, tone: str, title: str, label: str
) -> dict[str, Any]:
    width = max(LEAST, end - begin)
    return {
        "x": begin,
        "y": round(middle - height / 2, 1),
        "width": round(width, 1),
        "height": height,
        "tone": tone,
        "title": title,
        "label": label,
        "middle": round(begin + width / 2, 1),
        "base": round(middle + 4, 1),
    }


def _mark(picture: Picture, x: float, y: float, kind: str, title: str) -> None:
    """Add a mark, unless it would lie on the one before it."""
    y = round(y, 1)
    last = next((mark for mark in reversed(picture.marks) if (mark["kind"], mark["y"]) == (kind, y)), None)
    if last is None or abs(x - last["x"]) >= MARK_GAP:
        picture.marks.append({"x": x, "y": y, "kind": kind, "title": title})


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def span(length: float) -> str:
    """A duration as people read it: two units at most."""
    if length < 0.95:
        return f"{max(0.0, length):.1f} s"
    rest = round(length)
    parts: list[str] = []
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if rest >= unit or (unit == 1 and not parts):
            parts.append(f"{rest // unit} {name}")
            rest %= unit
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)
