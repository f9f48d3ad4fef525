"""JSON values, and what to pass instead of what is none."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final

from airflow_gpu.gang._model import opaque

_DEEPEST: Final = 64
_INSTEAD: Final = {
    "datetime": "its isoformat()",
    "date": "its isoformat()",
    "time": "its isoformat()",
    "DateTime": "its isoformat()",  # pendulum
    "timedelta": "its total_seconds()",
    "Duration": "its total_seconds()",
    "set": "a sorted list",
    "frozenset": "a sorted list",
    "bytes": "text",
    "bytearray": "text",
    "Decimal": "a float or text",
    "Fraction": "a float or text",
    "complex": "a list of two floats",
    "UUID": "text",
    "range": "a list",
    "generator": "a list",
    "ndarray": "its tolist()",
    "Tensor": "its tolist()",
    "DataFrame": "the address of a file",
    "Series": "its tolist()",
}


def json_value(value: Any, path: str, problems: list[str], depth: int = 0) -> Any:
    """``value`` as it will come out of JSON; what is wrong goes to ``problems``, with the path to it."""
    if value is None or isinstance(value, bool) or opaque(value):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            problems.append(
                f"argument '{path}' is {float(value)}, which JSON does not have: pass None or text"
            )
        return float(value)
    if depth > _DEEPEST:
        problems.append(f"argument '{path[:60]}...' is nested deeper than {_DEEPEST}, or holds itself")
        return None
    if isinstance(value, (list, tuple)):
        return [json_value(item, f"{path}[{i}]", problems, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _json_object(value, path, problems, depth)
    kind = type(value).__name__
    instead = "its str()" if isinstance(value, os.PathLike) else _INSTEAD.get(kind)
    if instead is None and callable(getattr(value, "item", None)):
        instead = "its item()"  # a numpy or torch scalar
    tip = f"; pass {instead}" if instead else ""
    problems.append(f"argument '{path}' is a {kind}: only JSON values travel to the ranks{tip}")
    return None


def _json_object(value: Mapping[Any, Any], path: str, problems: list[str], depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            tip = f"keys of JSON are text; pass {str(key)!r}"
            problems.append(f"argument '{path}' has the key {key!r}: {tip}")
            continue
        made[str.__str__(key)] = json_value(item, f'{path}["{key}"]', problems, depth + 1)
    return made
