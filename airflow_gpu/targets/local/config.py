"""What a person declares of a local cluster, from the Airflow connection.

Purpose: one small frozen object, checked when it is made, with errors that
name the field and say what would do.

What it does not do: look at the machine. GPUs, cores and memory that are not
declared are detected by the daemon (:mod:`.machine`).

The fields are of two kinds. The *shape* and ``idle_exit`` belong to the
cluster folder: all connections to one folder must agree on them, and a changed
shape is taken up when no gang is queued or running. The others (``grace``,
``requeue``, ``straggler``, ``python``, ``pass_env``, ``keep``) travel with
each job, so two connections may differ in them.

Example::

    LocalConfig(path="~/.airflow-gpu/local", nodes=2, gpus_per_node=4)
    LocalConfig.from_mapping({"path": "/scratch/gpu", "nodes": "2", "requeue": "true"})
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PATH: Final = "~/.airflow-gpu/local"
MOST_NODES: Final = 250
"""Each node has an address 127.0.0.(1 + index) of its own."""

OBJECT_STORES: Final = ("s3", "gs", "az", "abfs", "abfss")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._=+-]+(/[A-Za-z0-9._=+-]+)*/?")

SHAPE_FIELDS: Final = ("nodes", "gpus_per_node", "accelerator", "cpus", "memory", "pretend")

_YES: Final = frozenset({"true", "yes", "1", "on"})
_NO: Final = frozenset({"false", "no", "0", "off"})


class ConfigError(ValueError):
    """A field of the connection cannot be used. The message names it and says what would do."""


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """A local cluster as it is declared.

    :param path: the cluster folder, on a local file system. One daemon serves it.
    :param nodes: how many nodes this machine is split into.
    :param gpus_per_node: None: what ``nvidia-smi`` lists, split evenly.
    :param accelerator: None: the name ``nvidia-smi`` gives.
    :param cpus: cores of each node; None: the machine's, split evenly.
    :param memory: bytes of each node; None: the machine's, split evenly.
    :param pretend: declared GPUs need not be there, even on a machine that has some.
        On a machine without any, declared GPUs are always pretended.
    :param grace: seconds between the notice and the kill, for preemption and time limit.
    :param requeue: a preempted gang is started again by the cluster itself.
    :param straggler: seconds the other nodes of a gang have after one node ended badly.
    :param python: interpreter of the agents.
    :param channel: root that Airflow and the ranks share: a folder, or a prefix of an object store
        (``s3://``, ``gs://``, ``az://``), whose credentials come from ``[gpu] store_conn_ids``, not from
        here. None: ``<path>/runs``.
    :param idle_exit: seconds without a job after which the daemon ends by itself.
    :param keep: seconds for which an ended job can still be seen.
    :param pass_env: names of variables of the submitting process that gangs get as
        well; ``NAME*`` takes all that begin so. Airflow's own are never passed.
    """

    path: str | Path = DEFAULT_PATH
    nodes: int = 1
    gpus_per_node: int | None = None
    accelerator: str | None = None
    cpus: float | None = None
    memory: int | None = None
    pretend: bool = False
    grace: float = 30.0
    requeue: bool = False
    straggler: float = 60.0
    python: str = sys.executable
    channel: str | None = None
    idle_exit: float = 300.0
    keep: float = 7 * 86400.0
    pass_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        folder = Path(self.path).expanduser()
        if not folder.is_absolute():
            raise ConfigError(f"path must be absolute (or begin with ~), got {str(self.path)!r}")
        object.__setattr__(self, "path", folder)
        _integer("nodes", self.nodes, 1, MOST_NODES)
        if self.gpus_per_node is not None:
            _integer("gpus_per_node", self.gpus_per_node, 0, None)
        if self.memory is not None:
            _integer("memory", self.memory, 1, None)
        if self.cpus is not None:
            _number("cpus", self.cpus, above_zero=True)
        if self.accelerator is not None and not self.accelerator.strip():
            raise ConfigError("accelerator must not be empty; leave it out to have it detected")
        for name in ("grace", "straggler", "keep"):
            _number(name, getattr(self, name))
        _number("idle_exit", self.idle_exit, above_zero=True)
        if not self.python:
            raise ConfigError("python must name an interpreter, e.g. /usr/bin/python3")
        if self.channel is not None and not is_object_store(self.channel):
            local_path(self.channel, "channel")

    @property
    def folder(self) -> Path:
        """The cluster folder, absolute."""
        return Path(self.path)

    @property
    def channel_folder(self) -> Path | None:
        """The channel as a folder, which Airflow and the ranks see at the same place; None on an object store."""
        if self.channel is None:
            return self.folder / "runs"
        return None if is_object_store(self.channel) else local_path(self.channel, "channel")

    @property
    def channel_uri(self) -> str:
        """The channel as Airflow opens it."""
        folder = self.channel_folder
        return str(self.channel).rstrip("/") if folder is None else folder.as_uri()

    def cluster(self) -> dict[str, Any]:
        """The part that belongs to the folder, as ``cluster.json`` keeps it."""
        return {name: getattr(self, name) for name in (*SHAPE_FIELDS, "idle_exit")}

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> LocalConfig:
        """From a connection's extras, where numbers may be text. Unknown fields are errors, not ignored.

        :raises ConfigError: naming the field.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            if value is None or value == "":
                continue  # a form's empty field
            values[name] = _PARSERS[name](name, value) if name in _PARSERS else str(value)
        return cls(**values)


def is_object_store(uri: str) -> bool:
    """Whether a channel is a prefix of an object store.

    :raises ConfigError: it begins like one and is none.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme not in OBJECT_STORES:
        return False
    if not _PREFIX.fullmatch(rest):
        raise ConfigError(
            f"channel must be a folder, or bucket and prefix such as {scheme}://bucket/gangs of letters, digits and "
            "'._=+-', without a name, password or query: credentials belong into a connection that [gpu] "
            "store_conn_ids names for it"  # the value is not shown: it may hold a password
        )
    return True


def local_path(uri: str, name: str) -> Path:
    """The folder that ``uri`` (a path, or ``file://``) names on this machine.

    :raises ConfigError: for any other scheme, a host, or a relative path.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{name} must be a folder of this machine (a path or file:///...)"
            + (
                f" or one of {', '.join(f'{known}://' for known in OBJECT_STORES)}"
                if name == "channel"
                else ""
            )
            + f", got {uri!r}"
        )
    path = Path(unquote(parts.path) if parts.scheme else uri).expanduser()
    if not path.is_absolute():
        raise ConfigError(f"{name} must be an absolute path, got {uri!r}")
    return path


def _integer(name: str, value: object, least: int, most: int | None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"{name} must be a whole number, {limits}, got {value!r}")


def _number(name: str, value: object, *, above_zero: bool = False) -> None:
    good = (
        not isinstance(value, bool)
        and isinstance(value, (int, float))
        and math.isfinite(value)
        and value >= 0
    )
    if not good or (above_zero and value == 0):
        raise ConfigError(
            f"{name} must be a number {'above 0' if above_zero else 'of 0 or more'}, got {value!r}"
        )


def _to_int(name: str, value: Any) -> int:
    try:
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return int(value)
    except ValueError:
        pass
    raise ConfigError(f"{name} must be a whole number, got {value!r}")


def _to_float(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} must be a number, got {value!r}")


def _to_bool(name: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise ConfigError(f"{name} must be true or false, got {value!r}")


def _to_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(f"{name} must be a list of names, got {value!r}")


_PARSERS: Final[Mapping[str, Any]] = {
    "nodes": _to_int,
    "gpus_per_node": _to_int,
    "memory": _to_int,
    "cpus": _to_float,
    "grace": _to_float,
    "straggler": _to_float,
    "idle_exit": _to_float,
    "keep": _to_float,
    "pretend": _to_bool,
    "requeue": _to_bool,
    "pass_env": _to_names,
}
