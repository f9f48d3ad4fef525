"""pydantic's errors as sentences: the field as the author wrote it, and what would be right."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ValidationError

from airflow_gpu.gang.units import GangError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Loc = tuple[int | str, ...]

SECRET_NAME: Final = re.compile(
    r"(TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|APIKEY|[A-Z0-9]_KEY)$", re.IGNORECASE
)
"""Names of environment variables whose values are not shown, and should be given by reference."""

_SHOWN: Final = 60  # characters of a wrong value that an error repeats

_SENTENCES: Final[dict[str, str]] = {
    "missing": "is required",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of sensible size",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be True or False",
    "bool_parsing": "must be True or False",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be one of {expected}",
    "dict_type": "must be a dict",
}

ALSO_CALLED: Final = {
    "num_nodes": "nodes",
    "gpus": "gpus_per_node",
    "gpu": "gpus_per_node",
    "num_gpus": "gpus_per_node",
    "nproc_per_node": "ranks_per_node",
    "tasks_per_node": "ranks_per_node",
    "gpu_type": "accelerator",
    "cpus_per_node": "cpus",
    "cpu": "cpus",
    "mem": "memory",
    "container": "image",
    "docker_image": "image",
    "cmd": "command",
    "args": "command",
    "bash_command": "command",
    "python_callable": "function",
    "env_vars": "env",
    "environment": "env",
    "timeout": "time_limit",
    "walltime": "time_limit",
    "retries": "recovery",
    "conn_id": "targets",
    "target": "targets",
}
"""What authors know these fields as from other tools."""


def explain(cls: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """One sentence for each error."""
    for item in error.errors(include_url=False):
        kind, value, context = item["type"], item["input"], item.get("ctx") or {}
        told = context.get("error")
        loc = tuple(part for part in item["loc"] if part != "[key]")
        if isinstance(told, GangError):
            yield from _told(cls, loc, told)
        elif kind == "extra_forbidden":
            yield _unknown(cls, loc)
        elif told is not None:
            yield f"{path(loc)} {told}{_got(loc, kind, value)}"
        elif kind in ("model_type", "model_attributes_type"):
            part = part_of(_annotation(cls, loc))
            name = part.__name__ if part else "mapping"
            yield f"{path(loc)} must be a {name} or a dict{_got(loc, kind, value)}"
        else:
            text = _SENTENCES[kind].format(**context) if kind in _SENTENCES else item["msg"]
            if kind == "literal_error":
                close = difflib.get_close_matches(str(value), re.findall("'([^']*)'", text), n=1)
                text += f" (did you mean {close[0]!r}?)" if close else ""
            yield f"{path(loc)} {text}{_got(loc, kind, value)}"


def part_of(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's type: ``Recovery`` in ``Annotated[Recovery, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for option in get_args(annotation) if (found := part_of(option))), None)


def path(loc: Loc) -> str:
    """``recovery.mode``, ``command[2]``, ``env['A B']``."""
    text = ""
    for part in loc:
        if isinstance(part, int) or not part.isidentifier():
            text += f"[{part!r}]"
        else:
            text += f".{part}" if text else part
    return text


def _told(cls: type[BaseModel], loc: Loc, told: GangError) -> Iterator[str]:
    """What a part within, or a function, says of itself."""
    inner = part_of(_annotation(cls, loc)) if loc else None
    for problem in told.problems:
        if inner is not None:
            yield f"{path(loc)}.{problem}"
        else:
            yield f"{told.what} {problem}" if loc else problem


def _got(loc: Loc, kind: str, value: Any) -> str:
    """The wrong value, where it helps and where it cannot be a secret."""
    if kind == "missing" or "secrets" in loc or any(SECRET_NAME.search(str(part)) for part in loc):
        return ""
    if value is not None and not isinstance(value, (str, int, float, list, tuple, dict)):
        return f", got a {type(value).__name__}"
    if loc[:1] == ("env",) and isinstance(value, (list, tuple, dict)):
        return ""  # its values may be secrets, whatever it was meant to be
    shown = repr(value)
    return f", got {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'}"


def _annotation(cls: type[BaseModel], loc: Loc) -> Any:
    found: type[BaseModel] | None = cls
    annotation: Any = cls
    for part in loc:
        if found is None or str(part) not in found.model_fields:
            return None
        annotation = found.model_fields[str(part)].annotation
        found = part_of(annotation)
    return annotation


def _unknown(cls: type[BaseModel], loc: Loc) -> str:
    *above, last = loc
    owner = part_of(_annotation(cls, tuple(above))) or cls
    name, names = str(last), list(owner.model_fields)
    text = f"unknown argument {path(loc)!r}"
    for field, info in owner.model_fields.items():  # a field of a part, written beside it
        part = part_of(info.annotation)
        if part is not None and name in part.model_fields:
            return f"{text}; it belongs in {field}={part.__name__}({name}=...)"
    close = (
        [ALSO_CALLED[name]] if ALSO_CALLED.get(name) in names else difflib.get_close_matches(name, names, n=1)
    )
    if close:
        return f"{text}; did you mean {path((*above, close[0]))!r}?"
    return f"{text}; there are {', '.join(names)}"


def named(data: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """Those of the names that ``data`` gives a value."""
    return [name for name in names if not absent(data.get(name))]


def absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
