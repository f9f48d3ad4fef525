"""Runs a function that travelled as text: ``python3 -m airflow_gpu.runtime.call FUNCTION.PY``.

Purpose: what every rank of a gang executes when the gang is a Python function.
Beside ``function.py`` lies ``function.json``: ``{"name", "args", "kwargs"}``, and
``pass_gang`` (true or false; if absent, whether the function has a parameter of
that name). What rank 0's call returns is the result, unless it is None.

Limits: JSON both ways; nothing is unpickled. The module is called ``function``,
not ``__main__``, and can be imported under that name by child processes.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from airflow_gpu.runtime.api import gang
from airflow_gpu.runtime.words import EXIT_USAGE

HANDLE = "gang"
"""A parameter of this name gets the handle."""


class Uncallable(Exception):
    """The payload of the function is not what it should be."""


def load(path: str) -> Tuple[Callable[..., Any], List[Any], Dict[str, Any], bool]:
    """The function, its arguments, and whether it gets the handle. Raises Uncallable, and what the source raises."""
    folder = os.path.dirname(os.path.abspath(path))
    call = os.path.join(folder, os.path.splitext(os.path.basename(path))[0] + ".json")
    try:
        with open(call, encoding="utf-8") as file:
            body = json.load(file)
        name, args, kwargs = str(body["name"]), list(body.get("args") or []), dict(body.get("kwargs") or {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Uncallable(f"{call}: {error}") from None
    module_name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise Uncallable(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.append(folder)  # for processes that the function spawns, which import it by name
    sys.dont_write_bytecode = True  # all ranks read the payload's folder, none writes to it
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise Uncallable(f"{path} defines no function {name}")
    wanted = body.get("pass_gang")
    takes = HANDLE in inspect.signature(function).parameters
    return function, args, kwargs, takes if wanted is None else bool(wanted)


def main(arguments: Optional[List[str]] = None) -> int:
    """Answers the exit code; the function's own exceptions pass through, with their traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1:
        sys.stderr.write("usage: python3 -m airflow_gpu.runtime.call FUNCTION.PY\n")
        return EXIT_USAGE
    try:
        function, args, kwargs, takes_handle = load(words[0])
    except Uncallable as error:
        sys.stderr.write(f"[gang] {error}\n")
        return EXIT_USAGE
    with gang() as handle:
        if takes_handle:
            kwargs[HANDLE] = handle
        value = function(*args, **kwargs)
        if value is not None:
            handle.result(value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
