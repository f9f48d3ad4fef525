"""Values that travel as JSON, with errors that name the place.

Purpose: results and metrics leave the job as JSON. What is nearly JSON is made
so: numbers of NumPy, JAX or PyTorch that hold one value, and tuples. For
anything else the error says where in the value it is.

Limits: JSON has no NaN and no infinity; they become null, and the caller is
told. Bytes, sets, arrays and objects are refused: nothing is ever pickled.
"""

from __future__ import annotations

import math
from typing import Any, List, Tuple

MAX_DEPTH = 64
"""Levels of nesting; deeper ones are taken for a value that contains itself."""


def plain(value: Any, name: str) -> Tuple[Any, List[str]]:
    """The value as JSON holds it, and the places where a NaN or an infinity became null.

    Raises TypeError: ``result.losses[3] is a Tensor of shape (8,): ...``.
    """
    gaps: List[str] = []
    return _plain(value, name, gaps, 0), gaps


def _plain(value: Any, where: str, gaps: List[str], depth: int) -> Any:
    if value is None or (isinstance(value, (bool, str)) and type(value) in (bool, str)):
        return value
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} is nested more than {MAX_DEPTH} levels deep (does it contain itself?)")
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        gaps.append(f"{where} is {float(value)}")
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, a {type(key).__name__}: JSON has only text as keys"
                )
        return {str(key): _plain(item, f"{where}.{key}", gaps, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", gaps, depth + 1) for index, item in enumerate(value)]
    single = _single(value)
    if single is not None:
        return _plain(single, where, gaps, depth + 1)
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}{of_shape}, which cannot travel as JSON: "
        "hand back numbers, text, lists and dicts, and write larger things to a file"
    )


def _single(value: Any) -> Any:
    """The number in a NumPy, JAX or PyTorch value that holds exactly one; else None."""
    item, shape = getattr(value, "item", None), getattr(value, "shape", None)
    if not callable(item) or not isinstance(shape, tuple) or math.prod(shape) != 1:
        return None
    number = item()
    return number if isinstance(number, (bool, int, float)) else None
