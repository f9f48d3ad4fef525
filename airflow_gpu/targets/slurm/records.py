"""One job as Slurm shows it, whatever interface and version it was asked through.

Purpose: decodes answers tolerantly. Fields have changed their shapes between
versions: a state is a word or a list of words, a number is a number or
``{"set": true, "infinite": false, "number": 5}``, an exit code is a raw wait status
or an object. What is missing is None or empty, never an error.

What it does not do: interpret; that is :mod:`.words`.

Limits: times of the command line are in the cluster's time zone and are not decoded;
only REST gives them as seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

SQUEUE_FIELDS: Final = (
    ("JobID", 24),
    ("State", 24),
    ("Reason", 64),
    ("RestartCnt", 10),
    ("NodeList", 4096),
    ("Name", 80),
    ("Comment", 2048),
)
"""Of ``squeue --Format``: name and width. A value that is wider would be cut."""

SQUEUE_FORMAT: Final = ",".join(f"{name}:{width}|" for name, width in SQUEUE_FIELDS)

SACCT_FIELDS: Final = ("JobIDRaw", "JobName", "State", "ExitCode", "NodeList", "ElapsedRaw", "Restarts")
"""Of ``sacct --format`` from 23.11 on; older ones have no ``Restarts``."""


NEVER: Final = 2**32 - 2
"""The time at which a job started that never did."""


class Undecodable(ValueError):
    """An answer has not the shape that any known version gives."""


@dataclass(frozen=True, slots=True)
class Record:
    """A job. ``states``: base state and flags. ``nodes``: a hostlist such as ``gpu[01-03]``."""

    id: int
    name: str
    states: tuple[str, ...]
    reason: str = ""
    description: str = ""
    comment: str = ""
    restarts: int = 0
    nodes: str = ""
    submitted: float | None = None  # seconds since the epoch, by the controller's clock
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    elapsed: float | None = None  # seconds that it had nodes; None where it never had, or that is not told
    killed_by: str = ""  # who asked for its end, where accounting says: a name, or a number of a user
    accounting: bool = False  # from slurmdbd; the controller has forgotten it, or was not asked

    @property
    def native(self) -> str:
        """Slurm's own words, for people."""
        return ",".join(self.states)


def of_rest(job: Mapping[str, Any]) -> Record:
    """From ``/slurm/.../job(s)``.

    :raises Undecodable: without an id or a state.
    """
    number = _number(job.get("job_id"))
    states = _words(job.get("job_state"))
    if number is None or not states:
        raise Undecodable(f"a job without id or state: {sorted(job)[:20]}")
    code, signal = _exit(job.get("exit_code"))
    return Record(
        id=number,
        name=str(job.get("name") or ""),
        states=states,
        reason=str(job.get("state_reason") or ""),
        description=str(job.get("state_description") or ""),
        comment=str(job.get("comment") or ""),
        restarts=_number(job.get("restart_cnt")) or 0,
        nodes=str(job.get("nodes") or ""),
        submitted=_time(job.get("submit_time")),
        started=_time(job.get("start_time")),
        ended=_time(job.get("end_time")),
        exit_code=code,
        signal=signal,
    )


def of_accounting(job: Mapping[str, Any]) -> Record:
    """From ``/slurmdb/.../job(s)``: one life of a job that was started several times.

    :raises Undecodable: without an id or a state.
    """
    number = _number(job.get("job_id"))
    state = job.get("state") or {}
    states = _words(state.get("current") if isinstance(state, Mapping) else state)
    if number is None or not states:
        raise Undecodable(f"a job without id or state: {sorted(job)[:20]}")
    times = job.get("time") or {}
    code, signal = _exit(job.get("exit_code"))
    comment = job.get("comment") or {}
    return Record(
        id=number,
        name=str(job.get("name") or ""),
        states=states,
        reason=str(state.get("reason") or "") if isinstance(state, Mapping) else "",
        comment=str(comment.get("job") or "") if isinstance(comment, Mapping) else "",
        restarts=_number(job.get("restart_cnt")) or 0,
        nodes=_assigned(str(job.get("nodes") or "")),
        submitted=_time(times.get("submission")),
        started=_time(times.get("start")),
        ended=_time(times.get("end")),
        exit_code=code,
        signal=signal,
        elapsed=None
        if _number(times.get("start")) in (None, 0, NEVER)
        else float(_number(times.get("elapsed")) or 0),
        killed_by=str(job.get("kill_request_user") or ""),
        accounting=True,
    )


def of_state(job: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """From ``/slurm/.../jobs/state/``: id and states.

    :raises Undecodable: without an id or a state.
    """
    number, states = _number(job.get("job_id")), _words(job.get("state"))
    if number is None or not states:
        raise Undecodable(f"a job without id or state: {sorted(job)[:20]}")
    return number, states


def of_squeue(text: str) -> list[Record]:
    """From ``squeue --noheader --Format=<SQUEUE_FORMAT>``.

    :raises Undecodable: a line has another number of fields.
    """
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        # The comment is the last but for the empty end; a foreign one may hold anything, also a bar.
        fields = line.split("|", len(SQUEUE_FIELDS) - 1)
        if len(fields) != len(SQUEUE_FIELDS):
            raise Undecodable(f"squeue answered {line[:200]!r}")
        number, state, reason, restarts, nodes, name, comment = (field.strip() for field in fields)
        plain = number.split("_")[0].split("+")[
            0
        ]  # tasks of arrays and parts of heterogeneous jobs are not ours
        if not plain.isdecimal():
            raise Undecodable(f"squeue answered {line[:200]!r}")
        found.append(
            Record(
                id=int(plain),
                name=name,
                states=(state,),
                reason=reason,
                description=reason if " " in reason else "",
                comment=comment.rstrip("|").strip(),
                restarts=int(restarts) if restarts.isdecimal() else 0,
                nodes=_assigned(nodes),
            )
        )
    return found


def of_sacct(text: str, fields: tuple[str, ...] = SACCT_FIELDS) -> list[Record]:
    """From ``sacct --noheader --parsable2 --duplicates --allocations``, lives in their order.

    :raises Undecodable: a line has another number of fields.
    """
    found = []
    for line in text.splitlines():
        values = dict(zip(fields, line.split("|"), strict=False))
        if len(values) != len(fields) or not values["JobIDRaw"].isdecimal():
            raise Undecodable(f"sacct answered {line[:200]!r}")
        code, _, signal = values["ExitCode"].partition(":")
        found.append(
            Record(
                id=int(values["JobIDRaw"]),
                name=values["JobName"],
                states=(values["State"].split(" ")[0],),
                restarts=int(values.get("Restarts") or 0),
                nodes=_assigned(values["NodeList"]),
                exit_code=int(code) if code.isdecimal() else None,
                signal=int(signal) if signal.isdecimal() and signal != "0" else None,
                elapsed=float(values["ElapsedRaw"])
                if values["ElapsedRaw"].isdecimal() and values["NodeList"] != "None assigned"
                else None,
                killed_by=values["State"].partition(" by ")[2],
                accounting=True,
            )
        )
    return found


_HOSTS: Final = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")


def hosts(expression: str) -> tuple[str, ...]:
    """The names in a hostlist: ``gpu[01-03,07],login`` has five. In their order, which is that of node ranks.

    Limits: one pair of brackets a name, as Slurm writes them unless it was configured with several dimensions;
    any other expression gives nothing.
    """
    found: list[str] = []
    at = 0
    while at < len(expression):
        match = _HOSTS.match(expression, at)
        if match is None or match.end() == at:
            return ()
        head, ranges, tail = match.groups()
        if ranges is None:
            found.append(head + tail)
        else:
            for part in ranges.split(","):
                first, _, last = part.partition("-")
                last = last or first
                if not (first.isdecimal() and last.isdecimal()):
                    return ()
                found += [f"{head}{n:0{len(first)}d}{tail}" for n in range(int(first), int(last) + 1)]
        at = match.end()
    return tuple(found)


def latest(records: Iterable[Record]) -> dict[int, Record]:
    """By id: the newest life of each job that accounting knows."""
    found: dict[int, Record] = {}
    for record in records:
        known = found.get(record.id)
        if known is None or (record.restarts, record.submitted or 0) >= (
            known.restarts,
            known.submitted or 0,
        ):
            found[record.id] = record
    return found


def _assigned(nodes: str) -> str:
    return "" if nodes in ("None assigned", "(null)", "None") else nodes


def number(value: Any) -> int | None:
    """A number in either of its shapes; None where it is not set."""
    return _number(value)


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        if value.get("infinite") or value.get("set") is False:
            return None
        value = value.get("number")
    if isinstance(value, bool) or value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _time(value: Any) -> float | None:
    found = _number(value)
    return float(found) if found else None


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(word for word in re.split(r"[,+]", value) if word)
    if isinstance(value, (list, tuple)):
        return tuple(str(word) for word in value if word)
    return ()


def _exit(value: Any) -> tuple[int | None, int | None]:
    """Exit code and signal. A bare number is a wait status: 768 is exit code 3."""
    if isinstance(value, Mapping):
        code = _number(value.get("return_code"))
        told = value.get("signal") or {}
        signal = (
            _number(told.get("id") if "id" in told else told.get("signal_id"))
            if isinstance(told, Mapping)
            else None
        )
        return code, signal or None
    status = _number(value)
    if status is None:
        return None, None
    return status >> 8, (status & 0x7F) or None
