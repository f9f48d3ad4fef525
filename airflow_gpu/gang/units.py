"""Durations, sizes and what can be wrong with a request: the words an author writes, and their plain values.

Purpose: ``"1h30m"`` becomes seconds, ``"64GiB"`` becomes bytes, and a wrong one
becomes a sentence that says what would be right. No I/O, no clock.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST: Final = 3650 * 86400.0
"""The longest duration that is taken, in seconds: ten years. Every wait is bounded."""


class GangError(ValueError):
    """A request that cannot be right. Its text has one line for each thing that is wrong.

    :param what: what was being made, such as ``"Gang"``.
    :param problems: one text for each thing that is wrong.

    >>> print(GangError("Gang", ["nodes must be at least 1, got 0", "cpus must be a whole number, got 'x'"]))
    Gang: nodes must be at least 1, got 0
    Gang: cpus must be a whole number, got 'x'
    """

    def __init__(self, what: str, problems: str | Iterable[str]) -> None:
        self.what = what
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(what, self.problems)  # so that pickle and copy can make it again

    def __str__(self) -> str:
        return "\n".join(f"{self.what}: {problem}" for problem in self.problems)


class GangWarning(UserWarning):
    """A request that works, with something in it that its author would not want."""


_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)")
_UNIT_NAMES: Final = {
    **{name: name for name in _UNIT_SECONDS},
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("week", "weeks"), "w"),
}
# How Python prints a timedelta, which is what Jinja makes of one: "1 day, 2:03:04.5", "0:30:00".
_PRINTED: Final = re.compile(r"(?:(\d+) days?, )?(\d+):([0-5]\d):([0-5]\d(?:\.\d+)?)")
_NUMBER: Final = re.compile(r"\d+(?:\.\d*)?(?:e[+-]?\d+)?")

_LONGEST_TEXT: Final = 80

DURATION: Final = 'a duration: seconds, a timedelta, or text such as "90m", "1h30m" or "2d"'


def seconds(value: Any) -> float:
    """The duration ``value`` in seconds.

    Takes a number of seconds, a ``timedelta``, text with units (``ms``, ``s``,
    ``m``, ``h``, ``d``, ``w``, alone or one after the other), digits alone
    (seconds), or a timedelta as Python prints it. Raises ValueError when it is
    none of these, negative, not finite, or longer than :data:`LONGEST`.

    >>> seconds("1h30m"), seconds(timedelta(minutes=5)), seconds("2d")
    (5400.0, 300.0, 172800.0)
    """
    if isinstance(value, timedelta):
        result = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"must be {DURATION}")
    elif isinstance(value, str):
        result = _seconds_of_text(value.strip().lower()[: _LONGEST_TEXT + 1])
    else:
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
    if math.isnan(result) or result < 0:
        raise ValueError("must not be negative" if result < 0 else f"must be {DURATION}")
    if result > LONGEST:
        raise ValueError("must be at most 3650 days: every wait is bounded")
    return result


def _seconds_of_text(text: str) -> float:
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"must be {DURATION}")
    if _NUMBER.fullmatch(text):
        return float(text)
    if printed := _PRINTED.fullmatch(text):
        days, hours, minutes, rest = printed.groups()
        return int(days or 0) * 86400.0 + int(hours) * 3600.0 + int(minutes) * 60.0 + float(rest)
    total, at, seen = 0.0, 0, []
    for part in _PART.finditer(text):
        unit = _UNIT_NAMES.get(part[2])
        if text[at : part.start()].strip(" ,") or unit is None or unit in seen:
            break
        seen.append(unit)
        total += float(part[1]) * _UNIT_SECONDS[unit]
        at = part.end()
    if not seen or at != len(text):
        raise ValueError(f"must be {DURATION}")
    return total


_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)")
_FACTORS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgtp", 1)},
    **{f"{letter}i{b}": 1024**n for n, letter in enumerate("kmgtp", 1) for b in ("", "b")},
}

SIZE: Final = 'bytes or text such as "64GiB" (2**30 each) or "64GB" (10**9 each)'


def size(value: Any) -> int:
    """The size ``value`` in bytes.

    Takes a whole number of bytes, digits alone, or a number with ``KiB``,
    ``Ki``, ``KB``, and so on to ``P``. A bare ``G`` is refused: Kubernetes
    reads it as 10**9 bytes, Slurm as 2**30. Raises ValueError.

    >>> size("64GiB"), size("64GB"), size("1.5Ki")
    (68719476736, 64000000000, 1536)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"must be {SIZE}")
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"must be {SIZE}")
        return int(value)
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None:
        raise ValueError(f"must be {SIZE}")
    number, unit = match.groups()
    if unit in set("kmgtp"):
        letter = unit.upper()
        right = f"{number}{letter}iB or {number}{letter}B"
        raise ValueError(
            f"is ambiguous, Kubernetes and Slurm read a bare {letter} differently: write {right}"
        )
    factor = _FACTORS.get(unit)
    if factor is None:
        raise ValueError(f"must be {SIZE}")
    whole, _, fraction = number.partition(".")
    scaled = int(whole + fraction) * factor  # exact: no float between the text and the bytes
    if scaled % 10 ** len(fraction):
        raise ValueError("must be a whole number of bytes")
    return scaled // int(10 ** len(fraction))
