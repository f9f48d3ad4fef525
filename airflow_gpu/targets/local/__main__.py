"""``python -m airflow_gpu.targets.local --path DIR <command>``: the operator's command line.

Purpose: see what runs on this machine, and take nodes and gangs away or give
them back, with :class:`~.admin.Admin`.

What it does not do: submit. ``--json`` prints one JSON object, for scripts.

Example::

    python -m airflow_gpu.targets.local --path /scratch/gpu status
    python -m airflow_gpu.targets.local --path /scratch/gpu preempt train-fit-abc-1 --no-notice
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
from rich.table import Table

from airflow_gpu.targets.local.admin import Admin, AdminError
from airflow_gpu.targets.local.config import DEFAULT_PATH
from airflow_gpu.targets.local.schedule import GIB
from airflow_gpu.targets.local.words import HOLDING, WAITING

if TYPE_CHECKING:
    from collections.abc import Sequence

NODE_COMMANDS = {
    "kill-node": ("kill_node", "kill everything on a node and keep it down"),
    "restore-node": ("restore_node", "bring a killed node back"),
    "drain": ("drain", "let nothing new start on a node"),
    "undrain": ("undrain", "let gangs start on a drained node again"),
}

SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code: 0, or 1 when the cluster refused."""
    options = _parser().parse_args(arguments)
    console = Console()
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
    preempt.add_argument("name", help="name of the job")
    preempt.add_argument("--no-notice", action="store_true", help="kill it at once")
    for name, (_, about) in NODE_COMMANDS.items():
        commands.add_parser(name, help=about).add_argument("node", type=int, help="number of the node")
    stop = commands.add_parser("stop", help="end the daemon; gangs go on without it")
    stop.add_argument("--gangs", action="store_true", help="cancel all jobs first")
    stop.add_argument("--grace", type=float, default=0.0, help="seconds that they get (default 0)")
    return parser


def _act(admin: Admin, options: argparse.Namespace) -> str:
    if options.command == "preempt":
        return admin.preempt(options.name, notice=not options.no_notice)
    if options.command == "stop":
        return admin.stop(gangs=options.gangs, grace=options.grace)
    method, _ = NODE_COMMANDS[options.command]
    answer: str = getattr(admin, method)(options.node)
    return answer


def _show(status: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
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
    nodes = Table("node", "state", "free GPUs", "accelerator", "cores", "memory", "gangs", title="nodes")
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
    console.print(nodes)
    shown = Table("job", "state", "for", "priority", "shape", "starts", "hosts", title="jobs")
    reasons = []
    for name, row in sorted(jobs.items(), key=lambda item: item[1].get("order", 0)):
        if not options.all and "order" in row and row["native"] not in WAITING | HOLDING:
            continue
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
    console.print(shown if shown.row_count else "no jobs")
    for reason in reasons:
        console.print(escape(reason), soft_wrap=True)


def _span(seconds: float) -> str:
    for size, unit in SPANS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "0 s"


if __name__ == "__main__":
    sys.exit(main())
