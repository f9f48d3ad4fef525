"""What operators and cancels ask of the daemon: durable files, consumed and acknowledged.

Purpose: a command is a file in ``commands/``; the daemon applies it, answers
in ``acks/`` where an answer is wanted, and removes it. One that was applied
before a crash is not applied again, or does the same again.

What it does not do: wait for the effect. "Preempted" means that the notice is
on its way.

Limits: commands are applied in the order of their file names, which begin with
the clock's time; two within a moment may swap.

Example of one: ``{"v": 1, "kind": "preempt", "name": "fit-1", "notice": true, "ack": true}``
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from airflow_gpu.targets.local import supervise
from airflow_gpu.targets.local.config import SHAPE_FIELDS
from airflow_gpu.targets.local.files import Damaged, encode, read_json, replace_file
from airflow_gpu.targets.local.machine import MachineError, build_nodes, detect_gpus
from airflow_gpu.targets.local.records import Cause
from airflow_gpu.targets.local.words import Word

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_gpu.targets.local.cluster import Cluster
    from airflow_gpu.targets.local.supervise import Gang

FORMAT = 1
KILL_ROUNDS = 5
"""Looks for processes of a killed node within one command; whoever forked meanwhile is found by the next."""

KILL_PAUSE = 0.02

log = logging.getLogger(__name__)


class Refused(Exception):
    """The command cannot be obeyed. The message goes to who sent it."""


def obey(cluster: Cluster) -> None:
    """Apply all commands that lie there."""
    answers: list[tuple[Path, bool, dict[str, Any]]] = []
    for path in sorted(cluster.folder.commands.glob("[!.]*.json")):
        try:
            command = read_json(path)
        except Damaged as error:
            log.error("%s", error)
            command = {}
        if command is None:
            continue
        command["id"] = path.stem
        answer: dict[str, Any] = {"v": FORMAT, "ok": True}
        try:
            answer["message"] = _apply(cluster, command)
        except Refused as error:
            answer.update(ok=False, message=str(error))
        except Exception as error:  # the next command is not to wait for this one for ever
            log.exception("command %s failed", path.name)
            answer.update(ok=False, message=f"failed: {error!r}")
        log.info(
            "command %s %s: %s", command.get("kind"), command.get("name", command.get("node", "")), answer
        )
        answers.append((path, bool(command.get("ack")), answer))
    if not answers:
        return
    try:
        cluster.publish()  # whoever gets an answer finds its effect in the table
        for path, wanted, answer in answers:
            if wanted:
                replace_file(cluster.folder.acks / path.name, encode(answer))
            path.unlink(missing_ok=True)
    except OSError as error:
        log.error("a full disk? The commands are applied again next time: %s", error)


def _apply(cluster: Cluster, command: dict[str, Any]) -> str:
    kind = command.get("kind")
    handler = _HANDLERS.get(str(kind))
    if handler is None:
        raise Refused(f"no such command: {kind!r}")
    return handler(cluster, command)


# -- jobs ----------------------------------------------------------------------------------------


def _cancel(cluster: Cluster, command: dict[str, Any]) -> str:
    name = str(command.get("name"))
    if name not in cluster.gangs:
        cluster.take_in(everything=True)
    gang = cluster.gangs.get(name)
    if gang is None or gang.spec.id != command.get("job"):
        return f"{name} is gone"
    return _cancel_gang(gang, float(command.get("grace", 0.0)), str(command.get("reason") or "cancelled"))


def _cancel_gang(gang: Gang, grace: float, reason: str) -> str:
    if gang.state.ended:
        return f"{gang.spec.name} has ended"
    if gang.state.waiting:
        supervise.end_waiting(gang, Word.CANCELLED, reason)
        return f"{gang.spec.name} left the queue"
    supervise.stop(gang, Cause.CANCEL, grace, reason)
    gang.try_save()
    return f"{gang.spec.name} is to end within {grace:g} s"


def _cancel_all(cluster: Cluster, command: dict[str, Any]) -> str:
    gangs = cluster.unfinished()
    for gang in gangs:
        _cancel_gang(gang, float(command.get("grace", 0.0)), "all jobs were cancelled by the operator")
    return f"{len(gangs)} jobs are to end"


def _preempt(cluster: Cluster, command: dict[str, Any]) -> str:
    name = str(command.get("name"))
    gang = cluster.gangs.get(name)
    if gang is None:
        raise Refused(f"there is no job {name!r}")
    if command["id"] in gang.state.commands:
        return f"{name} was preempted already by this command"
    if not gang.state.holding:
        raise Refused(f"{name} is {gang.state.word}: only a gang that runs can be preempted")
    notice = bool(command.get("notice", True))
    gang.state.commands = (*gang.state.commands, command["id"])[-supervise.COMMANDS_KEPT :]
    supervise.stop(gang, Cause.PREEMPT, gang.spec.grace, "preempted by the operator", notice=notice)
    gang.try_save()
    return f"{name} has {gang.spec.grace:g} s" if notice else f"{name} is killed"


# -- nodes ---------------------------------------------------------------------------------------


def _kill_node(cluster: Cluster, command: dict[str, Any]) -> str:
    node = _node(cluster, command)
    cluster.down.add(node)
    cluster.save_marks()
    hit = [gang for gang in cluster.holding() if any(place.node == node for place in gang.state.places)]
    for gang in hit:
        # First it is written down: whatever exit code a shell still manages to write does not count.
        supervise.lose_node(gang, node, "was lost with its node")
        gang.try_save()
    for _ in range(KILL_ROUNDS):
        census = cluster.census.take({gang.spec.id for gang in hit})
        left = False
        for gang in hit:
            ranks = frozenset(place.rank for place in gang.state.places if place.node == node)
            members = {
                ident: marker for ident, marker in census[gang.spec.id].items() if marker.rank in ranks
            }
            supervise.kill(members, ranks)
            left = left or bool(members)
        if not left:
            break
        time.sleep(KILL_PAUSE)
    names = ", ".join(gang.spec.name for gang in hit)
    return f"node-{node} is down" + (f"; it took {names} with it" if names else "")


def _restore_node(cluster: Cluster, command: dict[str, Any]) -> str:
    node = _node(cluster, command)
    cluster.down.discard(node)
    cluster.save_marks()
    return f"node-{node} is up"


def _drain(cluster: Cluster, command: dict[str, Any]) -> str:
    node = _node(cluster, command)
    cluster.drained.add(node)
    cluster.save_marks()
    return f"nothing new starts on node-{node}"


def _undrain(cluster: Cluster, command: dict[str, Any]) -> str:
    node = _node(cluster, command)
    cluster.drained.discard(node)
    cluster.save_marks()
    return f"node-{node} takes gangs again"


def _node(cluster: Cluster, command: dict[str, Any]) -> int:
    node = command.get("node")
    if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < len(cluster.nodes):
        raise Refused(f"there is no node {node!r}; this cluster has 0 to {len(cluster.nodes) - 1}")
    return node


# -- the cluster ---------------------------------------------------------------------------------


def _configure(cluster: Cluster, command: dict[str, Any]) -> str:
    shape = command.get("shape")
    if not isinstance(shape, dict):
        raise Refused("no shape was given")
    changed = [name for name in SHAPE_FIELDS if shape.get(name) != cluster.shape.get(name)]
    if changed:
        # Jobs may lie there that this round has not seen: none is to be judged by another shape than its own.
        cluster.take_in(everything=True)
        busy = [gang.spec.name for gang in cluster.unfinished()]
        if busy:
            raise Refused(
                f"{', '.join(changed)} cannot change while jobs are queued or running (now: {', '.join(busy[:3])})"
            )
        try:
            cluster.nodes = build_nodes(shape, detect_gpus())
            cluster.problem = ""
        except MachineError as error:
            raise Refused(str(error)) from None
    cluster.shape = shape
    replace_file(cluster.folder.cluster, encode(shape), flush=True)
    return "taken up"


def _stop(cluster: Cluster, command: dict[str, Any]) -> str:
    cluster.closing = True
    running = len(cluster.holding())
    return "the daemon ends" + (f"; {running} gangs go on without it" if running else "")


_HANDLERS: dict[str, Callable[[Cluster, dict[str, Any]], str]] = {
    "cancel": _cancel,
    "cancel_all": _cancel_all,
    "preempt": _preempt,
    "kill_node": _kill_node,
    "restore_node": _restore_node,
    "drain": _drain,
    "undrain": _undrain,
    "configure": _configure,
    "stop": _stop,
}


def ack_path(acks: Path, identifier: str) -> Path:
    """Where the answer to a command lies."""
    return acks / f"{identifier}.json"
