"""Connections without Airflow: from a file or the environment, and only else from Airflow itself.

Purpose: the commands work while Airflow's database and API server are down, and
start in under a second. A connection is looked for in

1. the file of ``--connections``, in the format of Airflow's own local file
   backend (JSON, YAML or ``.env``);
2. the environment, ``AIRFLOW_CONN_<ID>``, as an address or as JSON;
3. Airflow: its secrets backends and its database. This imports Airflow, which
   takes seconds.

Limits: types other than ``gpu_local`` are built by their hooks, which import
Airflow's SDK; that works without a running Airflow, but is as slow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from airflow_gpu.hooks.target import KINDS, build_target
from airflow_gpu.targets.base import NotConfigured, Target, TargetError

PREFIX = "AIRFLOW_CONN_"
VARIABLE_PREFIX = "AIRFLOW_VAR_"


class BadFile(ValueError):
    """The file of connections cannot be used. The message has none of its values."""


@dataclass(frozen=True)
class PlainConnection:
    """A connection's fields, by the names that Airflow's has."""

    conn_id: str
    conn_type: str
    host: str | None = None
    login: str | None = None
    password: str | None = None
    schema: str | None = None
    port: int | None = None
    extra: str | None = None

    @property
    def extra_dejson(self) -> dict[str, Any]:
        found = json.loads(self.extra) if self.extra else {}
        return found if isinstance(found, dict) else {}

    def __repr__(self) -> str:
        return f"PlainConnection({self.conn_id!r}, {self.conn_type!r})"


class Connections:
    """Where connections come from, in this order: a file, the environment, Airflow."""

    def __init__(self, file: Path | None, env: Mapping[str, str]) -> None:
        self.file = file
        self._env = env
        self._given = read_file(file) if file is not None else {}

    def find(self, conn_id: str) -> tuple[PlainConnection | Any, str]:
        """The connection, and where it was found.

        :raises NotConfigured: it is nowhere.
        :raises TargetError: it is there, and cannot be understood.
        """
        value = self._given.get(conn_id)
        if value is not None:
            return parse(conn_id, value), f"the file {self.file}"
        name = PREFIX + conn_id.upper()
        if name in self._env:
            return parse(conn_id, self._env[name]), name
        return self._airflows(conn_id), "Airflow"

    def variable(self, name: str) -> str | None:
        """The value of an Airflow variable, from the environment or Airflow; None where there is none."""
        value = self._env.get(VARIABLE_PREFIX + name.upper())
        if value is not None:
            return value
        from airflow.models.variable import Variable

        found = Variable.get_variable_from_secrets(name)
        return None if found is None else str(found)

    def targets(self) -> list[str]:
        """Ids of the connections in file and environment that are targets of gangs."""
        named = dict(self._given)
        for name, value in self._env.items():
            if name.startswith(PREFIX):
                named.setdefault(name.removeprefix(PREFIX).lower(), value)
        found = []
        for conn_id, value in named.items():
            try:
                if parse(conn_id, value).conn_type in KINDS:
                    found.append(conn_id)
            except TargetError:
                continue
        return sorted(found)

    def _airflows(self, conn_id: str) -> Any:
        try:
            from airflow.models.connection import Connection

            return Connection.get_connection_from_secrets(conn_id)
        except Exception as error:
            where = f"the file {self.file}, " if self.file is not None else ""
            raise NotConfigured(
                f"connection {conn_id!r} is not in {where}{PREFIX}{conn_id.upper()}, and Airflow does not have it "
                f"or does not answer ({type(error).__name__})"
            ) from None


def target_of(conn: Any) -> Target:
    """The target that a connection names.

    :raises TargetError: it is none, or its fields are wrong.
    """
    if isinstance(conn, PlainConnection):
        if conn.conn_type == "gpu_local":  # without its hook, which would import Airflow
            from airflow_gpu.targets.local.config import LocalConfig
            from airflow_gpu.targets.local.target import LocalTarget

            try:
                return LocalTarget(conn.conn_id, LocalConfig.from_mapping(conn.extra_dejson))
            except (TypeError, ValueError) as error:
                raise TargetError(f"connection {conn.conn_id!r}: {error}") from error
        if conn.conn_type in KINDS:
            from airflow.sdk import Connection

            fields = {name: getattr(conn, name) for name in PlainConnection.__dataclass_fields__}
            conn = Connection(**fields)
    return build_target(conn)


def read_file(path: Path) -> dict[str, Any]:
    """Connections of a file, not understood yet.

    :raises BadFile: it cannot be read, or is not one of the formats.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            body = yaml.safe_load(text)
        elif path.suffix == ".env":
            lines = [line.strip() for line in text.splitlines()]
            body = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        else:
            body = json.loads(text)
    except Exception:  # its message could have a password in it
        raise BadFile(f"{path} is not JSON (.json), YAML (.yaml) or lines of ID=address (.env)") from None
    if not isinstance(body, dict):
        raise BadFile(f"{path} must map ids of connections to an address or to fields")
    return {
        str(conn_id): value[0] if isinstance(value, list) and value else value
        for conn_id, value in body.items()
    }


def parse(conn_id: str, value: Any) -> PlainConnection:
    """A connection from an address, from JSON, or from fields.

    :raises TargetError: without the value, which may be a secret.
    """
    try:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json.loads(value)
        fields = _of_address(value) if isinstance(value, str) else dict(value)
        extra = fields.pop("extra", fields.pop("extra_dejson", None))
        if extra is not None and not isinstance(extra, str):
            extra = json.dumps(extra)
        if fields.get("port") is not None:
            fields["port"] = int(fields["port"])
        known = {
            name: fields[name]
            for name in PlainConnection.__dataclass_fields__
            if fields.get(name) is not None
        }
        known.pop("conn_id", None)
        conn = PlainConnection(conn_id=conn_id, extra=extra, **known)
        _ = conn.extra_dejson  # JSON?
        return conn
    except (ValueError, TypeError, AttributeError):
        raise TargetError(
            f"connection {conn_id!r} cannot be understood; it must be an address such as type://host?field=value, "
            "or JSON with conn_type and extra"
        ) from None


def _of_address(text: str) -> dict[str, Any]:
    parts = urlsplit(text)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    extra = json.loads(query["__extra__"]) if "__extra__" in query else query
    return {
        "conn_type": parts.scheme.replace("-", "_"),
        "host": unquote(parts.hostname) if parts.hostname else None,
        "login": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        "schema": unquote(parts.path.lstrip("/")) or None,
        "port": parts.port,
        "extra": extra or None,
    }
