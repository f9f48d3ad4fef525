"""Kinds of fields of a request: the type, what is taken for it, and the sentence when it is wrong.

Errors are ValueErrors whose text follows the name of the field ("must be ...").
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    WrapValidator,
)

from airflow_gpu.gang._model import is_template, mode_of, opaque, templates
from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.units import seconds, size

RESERVED_ENV: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NPROC_PER_NODE", "ROLE_NAME"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_USE_AGENT_STORE",),
        *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    }
)
"""Environment names that the runtime sets on ranks, beside all that begin with ``GANG_``."""

AUTO: Final = "auto"
"""Of an interval: it follows from what is measured."""

MOST_NODES: Final = 100_000
MOST_PER_NODE: Final = 10_000
"""No machine is larger; a request that is, is a typing error."""

_MIB: Final = 2**20
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_CONN_ID: Final = re.compile(r"[\w#!()\-.:/\\]{1,250}")  # what Airflow takes as a connection id
_SECRET: Final = re.compile(
    r"conn:[\w!()\-.:/\\]{1,250}#(?:password|login|host|extra\.[\w.\-]+)|var:[\w.\-/:]{1,250}"
)


def _item(value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
    """A template inside of a list or a mapping passes, as it does for a whole field."""
    return value if mode_of(info) == "written" and is_template(value) else check(value)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _no_bytes(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        raise ValueError("must be text")
    return value


def _memory(value: Any) -> int:
    found = size(value)
    if found < _MIB:
        raise ValueError('must be at least 1 MiB: a number alone is bytes, "64GiB" has its unit')
    return found


def _one_line(value: str) -> str:
    if _CONTROL.search(value):
        raise ValueError("must be one line of text")
    return value


def _word(value: Any, info: ValidationInfo) -> Any:
    """Text for a command line or the environment. Numbers are written out."""
    if isinstance(value, bool) and mode_of(info) == "written":
        raise ValueError('must be text: write "1", "true" or "True", as the program reads it')
    if isinstance(value, (bool, int, float)):  # Airflow's native rendering makes True of "True"
        return str(value)
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must not contain a NUL character")
    return _no_bytes(value)


def _node_folder(value: str) -> str:
    _one_line(value)
    if not value.startswith("/") or value.rstrip("/") == "" or ".." in value.split("/"):
        raise ValueError(
            'must be the absolute path of a folder that every node has of its own, such as "/local/ckpt"'
        )
    return value


def _env_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be a name of letters, digits and _, not starting with a digit")
    if name in RESERVED_ENV or name.startswith("GANG_"):
        raise ValueError("is set by the runtime on every rank: choose another name")
    return name


def _secret(value: str) -> str:
    if _SECRET.fullmatch(value):
        return value
    right = '"conn:<connection id>#password" (or #login, #host, #extra.<key>) or "var:<variable>"'
    if value.startswith("conn:"):
        raise ValueError(f"must name a field of the connection: {right}")
    raise ValueError(f"must be a reference, {right}, never the secret itself (what was given is not shown)")


def _command(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            what = str(error).lower()
            raise ValueError(f"must be a line that a shell can split ({what}): check its quotes") from None
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of texts, or one text that is split as a shell does")
    if not value or (isinstance(value[0], str) and not value[0].strip()):
        raise ValueError("must start with the program to run")
    return list(value)


def _script(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


def _function(value: Any, info: ValidationInfo) -> FunctionSource | None:
    if value is None or isinstance(value, FunctionSource):
        made = value
    elif isinstance(value, Mapping):
        made = FunctionSource.from_dict(value)
    elif callable(value):
        made = FunctionSource.of(value, (), {})
    else:
        raise ValueError("must be a function")
    if made is not None and mode_of(info) != "written":
        left = [*templates(made.args, "args", opaque), *templates(made.kwargs, "kwargs", opaque)]
        if left:
            raise ValueError(f"has arguments that Airflow has not rendered: {', '.join(left)}")
        made.bind(made.args, made.kwargs)  # one without arguments may have passed until here
    return made


def _targets(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, (set, frozenset)):
        raise ValueError("must be a list: its order counts")
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a connection id or a list of them")
    made: list[Any] = []
    for item in (item.strip() if isinstance(item, str) else item for item in value):
        if not opaque(item) and item in made:
            raise ValueError(f"must name each connection once, and {item!r} is there twice")
        made.append(item)
    if not made:
        raise ValueError('must name at least one connection, such as "gpu_default"')
    return made


def _connection(value: str) -> str:
    if not _CONN_ID.fullmatch(value):
        raise ValueError("must be an Airflow connection id")
    return value


def _interval(value: Any) -> float | str:
    if value == AUTO:
        return AUTO
    found = seconds(value)
    if found <= 0:
        raise ValueError(f'must be greater than 0, or "{AUTO}"')
    return found


def work_of(value: Any) -> Any:
    """A bare number of hours as a ``Work``."""
    return {"hours": value} if isinstance(value, (int, float, str)) else value


Count: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=10**9)]
AtLeastOne: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=10**9)]
Nodes: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=MOST_NODES)]
Gpus: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=MOST_PER_NODE)]
PerNode: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=MOST_PER_NODE)]
Priority: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(10**9), le=10**9)]
Number: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
Bytes: TypeAlias = Annotated[int, BeforeValidator(_memory), Field(le=2**60)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(seconds)]
NodeFolder: TypeAlias = Annotated[str, AfterValidator(_node_folder)]
SomeSeconds: TypeAlias = Annotated[float, BeforeValidator(seconds), Field(gt=0)]
Interval: TypeAlias = Annotated[float | str, PlainValidator(_interval)]
Text: TypeAlias = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=1000),
    BeforeValidator(_no_bytes),
    AfterValidator(_one_line),
]
Word: TypeAlias = Annotated[str, BeforeValidator(_word), WrapValidator(_item)]
EnvName: TypeAlias = Annotated[str, BeforeValidator(_no_bytes), AfterValidator(_env_name)]
SecretRef: TypeAlias = Annotated[
    str, BeforeValidator(_no_bytes), AfterValidator(_secret), WrapValidator(_item)
]
Connection: TypeAlias = Annotated[
    str, BeforeValidator(_no_bytes), AfterValidator(_connection), WrapValidator(_item)
]
Command: TypeAlias = Annotated[tuple[Word, ...], BeforeValidator(_command)]
Script: TypeAlias = Annotated[str, BeforeValidator(_no_bytes), AfterValidator(_script)]
Function: TypeAlias = Annotated[FunctionSource | None, PlainValidator(_function)]
Targets: TypeAlias = Annotated[tuple[Connection, ...], BeforeValidator(_targets)]
Env: TypeAlias = dict[EnvName, Word]
Secrets: TypeAlias = dict[EnvName, SecretRef]

# What an author may write for one.
Duration: TypeAlias = float | str | timedelta
Whole: TypeAlias = int | str
