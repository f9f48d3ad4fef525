"""What every command has: the options that say where it works, and how its coroutine is run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from airflow_gpu.cli.place import Given, Place


def placed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where a command works; the function gets a ``place``."""

    @click.option("--installation", help="Name of the Airflow installation. Default: [gpu] installation.")
    @click.option("--state-uri", help="Root of the run directories. Default: [gpu] state_uri.")
    @click.option(
        "--connections",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="AIRFLOW_GPU_CONNECTIONS",
        help="JSON, YAML or .env file of connections, as of Airflow's local file backend.",
    )
    @click.option("--targets", help="Connection ids to ask beside those that run directories name.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def wrapped(
        installation: str | None,
        state_uri: str | None,
        connections: Path | None,
        targets: str | None,
        **more: Any,
    ) -> Any:
        return function(place=Place(Given(installation, state_uri, connections, targets)), **more)

    return wrapped


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run a command's coroutine; a store that does not answer is an error with words, not a traceback."""
    from airflow_gpu.rundir.store import StoreError

    try:
        return asyncio.run(work)
    except StoreError as error:
        raise click.ClickException(f"the run directories: {error}") from None
