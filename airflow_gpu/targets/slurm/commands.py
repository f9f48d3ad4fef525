"""Slurm through its own commands: sbatch, squeue, sacct, scancel, sinfo, here or on a login node.

Purpose: the way for clusters without slurmrestd. One ``squeue`` answers for all gangs of a
connection. Formats are the plain ones that every version since 21.08 prints, so a
Slurm that was built without JSON will do.

How: a :class:`Runner` runs one command; :class:`Here` does it on this machine (behind
``command_prefix``), :mod:`.login` over SSH. Nothing of the environment of Airflow's
process reaches a job: ``sbatch --export=NIL``.

What it does not do: send a submit twice.

Limits: ``squeue`` shows ``COMPLETING`` alone, so what a job is ending as is known once it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.slurm import records
from airflow_gpu.targets.slurm.access import AccessError, NoAccounting, NodeInfo, refusal
from airflow_gpu.targets.slurm.batch import Batch
from airflow_gpu.targets.slurm.records import Record, Undecodable

TIMEOUT: Final = 60.0
"""Seconds for one command. Slurm's own give up after MessageTimeout (10 s by default) a few times."""

PASSED: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "SLURM_CONF", "KUBECONFIG")
"""Variables of this process that Slurm's commands get here."""

MOST_NAMED: Final = 400
"""Ids on one command line."""

NODE_FIELDS: Final = (
    "NodeList",
    "StateLong",
    "Gres",
    "GresUsed",
    "CPUs",
    "CPUsState",
    "Memory",
    "AllocMem",
    "Partition",
    "Features",
    "Reason",
)
NODE_FORMAT: Final = ",".join(
    f"{name}:{1024 if name in ('Features', 'Reason', 'Gres', 'GresUsed') else 128}|" for name in NODE_FIELDS
)


class _Passing(TargetError):
    """An error after which the same question may be answered."""


class Runner(Protocol):
    """Runs one command where Slurm's are."""

    async def run(self, argv: Sequence[str], stdin: bytes = b"") -> tuple[int, str, str]:
        """Exit code, output, errors. Raises TargetError when it could not be run or did not end in time."""
        ...

    async def close(self) -> None: ...


class Here:
    """On this machine. ``prefix``: put before each command."""

    def __init__(self, name: str, prefix: Sequence[str] = ()) -> None:
        self._name = name
        self._prefix = tuple(prefix)

    async def run(self, argv: Sequence[str], stdin: bytes = b"") -> tuple[int, str, str]:
        words = [*self._prefix, *argv]
        env = {name: os.environ[name] for name in PASSED if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError:
            raise AccessError(
                f"{self._name}: there is no command {words[0]!r} on this machine: install Slurm's client, or set url to "
                "https://... (slurmrestd) or ssh://user@login"
            ) from None
        except OSError as error:
            raise TargetError(f"{self._name}: {words[0]} could not be started: {error}") from None
        try:
            async with asyncio.timeout(TIMEOUT):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            raise _Passing(f"{self._name}: {argv[0]} did not end within {TIMEOUT:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
        return process.returncode or 0, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    async def close(self) -> None:
        """Nothing is held."""


class Commands:
    """Slurm's commands, run by ``runner``."""

    def __init__(self, name: str, runner: Runner) -> None:
        self._name = name
        self._runner = runner
        self._restarts = True  # sacct has the field: 23.11 and later

    async def submit(self, batch: Batch) -> int:
        code, out, err = await self._runner.run(["sbatch", "--parsable"], batch.text.encode())
        found = re.fullmatch(r"(\d+)(;.*)?", out.strip().splitlines()[-1]) if out.strip() else None
        if code == 0 and found:
            return int(found[1])
        raise refusal(self._name, _said(err) or _said(out) or f"sbatch ended with {code}")

    async def jobs(self, ids: Collection[int]) -> list[Record]:
        wanted = set(ids)
        return [record for record in await self.mine() if record.id in wanted] if wanted else []

    async def mine(self) -> list[Record]:
        return await self._squeue()

    async def _squeue(self, *which: str) -> list[Record]:
        form = f"--Format={records.SQUEUE_FORMAT}"
        out = await self._ask(["squeue", "--noheader", "--all", "--me", "--states=all", form, *which])
        try:
            return records.of_squeue(out)
        except Undecodable as error:
            raise TargetError(f"{self._name}: {error}") from None

    async def history(self, ids: Collection[int]) -> list[Record]:
        wanted = sorted(set(ids))
        found: list[Record] = []
        for at in range(0, len(wanted), MOST_NAMED):
            found += await self._sacct(["--jobs", ",".join(map(str, wanted[at : at + MOST_NAMED]))])
        return list(records.latest(found).values())

    async def named(self, name: str, *, sure: bool) -> list[Record]:
        now = [record for record in await self._squeue("--name", name) if record.name == name]
        if now:
            return now
        try:
            past = await self._sacct(["--name", name, "--starttime", "now-30days"])
        except NoAccounting:
            return []
        return [record for record in records.latest(past).values() if record.name == name]

    async def signal(self, job: int, name: str) -> None:
        await self._order(["scancel", "--signal", name, str(job)])

    async def cancel(self, job: int) -> None:
        await self._order(["scancel", str(job)])

    async def nodes(self) -> list[NodeInfo]:
        out = await self._ask(["sinfo", "--noheader", "--Node", "--all", f"--Format={NODE_FORMAT}"])
        return _nodes(out)

    async def kill_wait(self) -> float | None:
        out = await self._ask(["scontrol", "show", "config"])
        found = re.search(r"^KillWait\s*=\s*(\d+)", out, re.MULTILINE)
        return float(found[1]) if found else None

    async def close(self) -> None:
        await self._runner.close()

    # -- how

    async def _sacct(self, which: list[str]) -> list[Record]:
        for _ in range(2):
            fields = records.SACCT_FIELDS if self._restarts else records.SACCT_FIELDS[:-1]
            argv = [
                "sacct",
                "--noheader",
                "--parsable2",
                "--duplicates",
                "--allocations",
                f"--format={','.join(fields)}",
            ]
            try:
                out = await self._ask([*argv, *which])
            except TargetError as error:
                if self._restarts and "restarts" in str(error).lower():
                    self._restarts = False
                    continue
                if "accounting storage is disabled" in str(error).lower():
                    raise NoAccounting(str(error)) from None
                raise
            try:
                found = records.of_sacct(out, fields)
            except Undecodable as error:
                raise TargetError(f"{self._name}: {error}") from None
            # Without the field: the lives of a job come in their order.
            return found if self._restarts else _counted(found)
        raise AssertionError("not reached")

    async def _ask(self, argv: Sequence[str]) -> str:
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(3),
            wait=wait_random_exponential(multiplier=0.3, max=3.0),
            retry=retry_if_exception_type(_Passing),
            reraise=True,
        ):
            with attempt:
                code, out, err = await self._runner.run(argv)
                if code != 0:
                    raise self._error(argv, code, err or out)
        return out

    async def _order(self, argv: Sequence[str]) -> None:
        """One that may be repeated, and is no error for a job that is over."""
        code, out, err = await self._runner.run(argv)
        said = _said(err or out)
        over = ("invalid job id", "already completing", "already completed", "job/step already")
        if code != 0 and not any(sign in said.lower() for sign in over):
            raise self._error(argv, code, said)

    def _error(self, argv: Sequence[str], code: int, said: str) -> TargetError:
        words = _said(said) or f"ended with {code}"
        text = words.lower()
        if code in (126, 127) or "command not found" in text:
            return AccessError(
                f"{self._name}: {argv[0]} is not found there: {words}. Is it a login node, with Slurm in PATH?"
            )
        kind = (
            _Passing
            if any(sign in text for sign in ("unable to contact", "timed out", "zero bytes", "temporarily"))
            else TargetError
        )
        return kind(f"{self._name}: {argv[0]}: {words}")


def quoted(argv: Sequence[str]) -> str:
    """As one line for a shell on the other side."""
    return " ".join(shlex.quote(word) for word in argv)


def _said(text: str) -> str:
    """Slurm's own words, without the name of the command in front."""
    rows = [
        re.sub(r"^(sbatch|squeue|sacct|scancel|sinfo|scontrol|slurm_\w+): (error: )?", "", row).strip()
        for row in text.splitlines()
    ]
    return "; ".join(dict.fromkeys(row for row in rows if row))[:500]


def _counted(found: list[Record]) -> list[Record]:
    from dataclasses import replace

    seen: dict[int, int] = {}
    counted = []
    for record in found:
        restarts = seen.get(record.id, -1) + 1
        seen[record.id] = restarts
        counted.append(replace(record, restarts=restarts))
    return counted


def _nodes(text: str) -> list[NodeInfo]:
    """One for each node; ``sinfo`` prints a line for each of its partitions."""
    found: dict[str, NodeInfo] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < len(NODE_FIELDS):
            continue
        row = dict(zip(NODE_FIELDS, fields, strict=False))
        known = found.get(row["NodeList"])
        partition = row["Partition"].rstrip("*")
        words = tuple(word.upper() for word in re.split(r"[+]", row["StateLong"].rstrip("*~#!%$@^-")) if word)
        flags = tuple(_FLAGS[sign] for sign in row["StateLong"] if sign in _FLAGS)
        used = row["CPUsState"].split("/")[0]
        found[row["NodeList"]] = NodeInfo(
            name=row["NodeList"],
            states=words + flags,
            gres=_real(row["Gres"]),
            gres_used=_real(row["GresUsed"]),
            cpus=_whole(row["CPUs"]),
            cpus_used=_whole(used),
            memory=_whole(row["Memory"]),
            memory_used=_whole(row["AllocMem"]),
            partitions=(*(known.partitions if known else ()), partition),
            features=tuple(name for name in _real(row["Features"]).split(",") if name),
            reason="" if row["Reason"] in ("none", "N/A") else row["Reason"],
        )
    return list(found.values())


_FLAGS: Final = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWERING_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""What ``sinfo`` appends to a state."""


def _real(text: str) -> str:
    return "" if text in ("(null)", "N/A", "none") else text


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0
