"""``python -m airflow_gpu.targets.local --path DIR <command>``: the operator's command line.

Purpose: see what runs on this machine, and take nodes and gangs away or give
them back, with :class:`~.admin.Admin`.

What it does not do: submit. ``--json`` prints one JSON object, for scripts.

Example::

    python -m airflow_gpu.targets.local --path /scratch/gpu status
    python -m airflow_gpu.targets.local --path /scratch/gpu preempt train-fit --no-notice
    python -m airflow_gpu.targets.local --path /scratch/gpu kill-node 1
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from airflow_gpu.targets.local.admin import Admin, AdminError
from airflow_gpu.targets.local.config import DEFAULT_PATH
from airflow_gpu.targets.local.schedule import GIB
from airflow_gpu.targets.local.words import HOLDING, WAITING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMES = frozenset({"job", "node", "gangs", "state", "for"})
"""Columns that are never broken or cut."""

NODE_COMMANDS = {
    "kill-node": ("kill_node", "kill everything on a node and keep it down"),
    "restore-node": ("restore_node", "bring a killed node back"),
    "drain": ("drain", "let nothing new start on a node"),
    "undrain": ("undrain", "let gangs start on a drained node again"),
}

PIPE_WIDTH = 200
"""Characters of a line where there is no terminal: a pipe has no width of its own."""

SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code: 0, or 1 when the cluster refused."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    try:
        admin = Admin(options.path)
        if options.command == "status":
            _show(admin.status(), options, console)
            return 0
        message = _act(admin, options)
    except AdminError as error:
        if options.json:
            console.print_json(json.dumps({"ok": False, "message": str(error)}))
        else:
            Console(stderr=True).print(f"[red]{escape(str(error))}[/red]")
        return 1
    if options.json:
        console.print_json(json.dumps({"ok": True, "message": message}))
    else:
        console.print(escape(message))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_gpu.targets.local", description="A local GPU cluster."
    )
    parser.add_argument("--path", default=DEFAULT_PATH, help=f"the cluster folder (default {DEFAULT_PATH})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="show nodes and jobs")
    status.add_argument("--all", action="store_true", help="also jobs that have ended")
    preempt = commands.add_parser("preempt", help="take the nodes of a gang")
    preempt.add_argument("name", help="name of the job, or the beginning of it")
    preempt.add_argument("--no-notice", action="store_true", help="kill it at once")
    for name, (_, about) in NODE_COMMANDS.items():
        commands.add_parser(name, help=about).add_argument("node", type=int, help="number of the node")
    stop = commands.add_parser("stop", help="end the daemon; gangs go on without it")
    stop.add_argument("--gangs", action="store_true", help="cancel all jobs first")
    stop.add_argument("--grace", type=float, default=0.0, help="seconds that they get (default 0)")
    return parser


def _act(admin: Admin, options: argparse.Namespace) -> str:
    if options.command == "preempt":
        name = _running(options.name, admin.status()["jobs"])
        return admin.preempt(name, notice=not options.no_notice)
    if options.command == "stop":
        return admin.stop(gangs=options.gangs, grace=options.grace)
    method, _ = NODE_COMMANDS[options.command]
    answer: str = getattr(admin, method)(options.node)
    return answer


def _running(text: str, jobs: Mapping[str, Any]) -> str:
    """The job that runs and is called that or begins so; the text itself where none does.

    :raises AdminError: several begin so.
    """
    fitting = sorted(name for name, row in jobs.items() if name.startswith(text) and row["native"] in HOLDING)
    if text in jobs or not fitting:
        return text
    if len(fitting) > 1:
        raise AdminError(f"{text!r} could be any of: {', '.join(fitting)}")
    return fitting[0]


def _lives(row: Mapping[str, Any]) -> bool:
    """It waits, runs, or cannot be read: then nobody knows."""
    return "order" not in row or row["native"] in WAITING | HOLDING


def _print(console: Console, table: Table) -> None:
    """A table whose names are whole also where the terminal is narrower: then it breaks the lines."""
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
    console.width = max(needed, console.width)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    made = Table(title=title)
    for column in columns:
        made.add_column(column, no_wrap=column in NAMES)
    return made


def _show(status: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    if not options.all:
        status = {**status, "jobs": {name: row for name, row in status["jobs"].items() if _lives(row)}}
    if options.json:
        console.print_json(json.dumps(status))
        return
    daemon = status["daemon"]
    console.print(
        f"daemon: {'pid ' + str(daemon['pid']) if daemon['alive'] else 'none (starts when it is needed)'}"
    )
    if status.get("problem"):
        console.print(f"[red]nothing can start: {escape(status['problem'])}[/red]")
    jobs = status["jobs"]
    on_node: dict[int, list[str]] = {}
    used: dict[int, int] = {}
    for name, row in jobs.items():
        for node, gpus in row.get("held", ()):
            on_node.setdefault(node, []).append(name)
            used[node] = used.get(node, 0) + len(gpus)
    nodes = _table("nodes", "node", "state", "free GPUs", "accelerator", "cores", "memory", "gangs")
    for row in status["nodes"]:
        index = row["index"]
        nodes.add_row(
            row["host"],
            row["state"],
            f"{len(row['gpus']) - used.get(index, 0)} of {len(row['gpus'])}",
            escape(row["accelerator"] or "-"),
            f"{row['cpus']:g}",
            f"{row['memory'] / GIB:.1f} GiB",
            "\n".join(on_node.get(index, ["-"])),
        )
    _print(console, nodes)
    shown = _table("jobs", "job", "state", "for", "priority", "shape", "starts", "hosts")
    reasons = []
    for name, row in sorted(jobs.items(), key=lambda item: item[1].get("order", 0)):
        if "order" not in row:
            shown.add_row(name, row["native"])
            reasons.append(f"{name}: {row['reason']}")
            continue
        if row["reason"]:
            # Below the table: a sentence in a narrow column is unreadable.
            reasons.append(f"{name}: {row['reason']}")
        shown.add_row(
            name,
            row["native"],
            _span(time.time() - row["since"]),
            str(row["priority"]),
            f"{row['nodes']} x {row['gpus_per_node']} GPUs",
            str(row["restart"] + (row["native"] not in WAITING)),
            " ".join(row["hosts"]),
        )
    if shown.row_count:
        _print(console, shown)
    else:
        console.print("no jobs")
    for reason in reasons:
        console.print(escape(reason), soft_wrap=True)


def _span(seconds: float) -> str:
    for size, unit in SPANS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "0 s"


if __name__ == "__main__":
    sys.exit(main())
