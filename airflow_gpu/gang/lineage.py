"""Does a checkpoint belong to what is asked now? Programs are compared by what they are, not by when they ran.

Purpose: a retry or a cleared task may have been given other code or other
arguments since the checkpoint was written. Going on from it would be silent
nonsense, so a change is found, named, and said.

What it does not do: look into files or images. A script on a shared folder
that was edited in place has the same command.

Limits: text that differs between tries by itself (``{{ ti.try_number }}`` in a
command) counts as a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROGRAM = ("command", "script", "function", "launch", "env", "image")
"""Fields of a request that say what is computed. The rest says where, how large and how long."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the program differs between two requests (``Gang.to_dict``), in words; empty: it is the same."""
    found: list[str] = []
    for name in PROGRAM:
        old, new = before.get(name), now.get(name)
        if old == new or not (old or new):
            continue
        if name == "function" and isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [
                f"the function's {part}" for part in sorted({*old, *new}) if old.get(part) != new.get(part)
            ]
        elif name == "env" and isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [f"env.{part}" for part in sorted({*old, *new}) if old.get(part) != new.get(part)]
        else:
            found.append(name)
    return found
