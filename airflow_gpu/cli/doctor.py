"""``airflow-gpu doctor``: settings, state store, targets, channels; with ``--job`` also from inside a job.

Purpose: one table that says what works, and for what does not, one sentence on
what to do. Everything is found out by doing it: stores are written to and
raced, targets asked, and the job is a gang of one node like any other.

What it does not do: start anything without ``--job``.

Limits: a check that needs an earlier one is left out when that failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from secrets import token_bytes, token_hex

from airflow_gpu.cli.checks import FAIL, LEFT_OUT, OK, WARN, Check, clock, off
from airflow_gpu.cli.inside import in_a_job, small_gang
from airflow_gpu.cli.place import Place
from airflow_gpu.cli.remedies import remedy, target_remedy
from airflow_gpu.cli.show import cell, out, print_json, table
from airflow_gpu.gang.identity import LABEL_PREFIX
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.sweeping.decide import installation_label
from airflow_gpu.sweeping.listing import run_dirs
from airflow_gpu.targets.base import NotConfigured, Offer, Target, TargetError
from airflow_gpu.targets.watch import bounded

PROVE_LIMIT = 40.0
"""Seconds for the race of writers. Without credentials obstore asks the machine's cloud for some, and waits long."""

STORE_SLOW = 5.0
"""Seconds that the race of writers may take before it is worth a warning."""

_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", LEFT_OUT: "dim"}


async def examine(
    place: Place, names: list[str], *, job: bool, wait: float, secrets: Mapping[str, str], as_json: bool
) -> int:
    """All checks; 3 when one has failed.

    :param secrets: for the job, by reference, as in ``Gang.secrets``.
    """
    checks = _settings(place)
    store_checks, good = await _state_store(place)
    checks += store_checks
    targets = names or place.names()
    if not targets:
        checks.append(
            Check(
                "targets",
                "known",
                WARN,
                "none",
                "name connections: airflow-gpu doctor ID, or [gpu] targets, or AIRFLOW_CONN_<ID>",
            )
        )
    for name in targets:
        checks += await _target(place, name, job=job and good, wait=wait, secrets=secrets)
    failed = any(check.result == FAIL for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _show(checks)
    return 3 if failed else 0


def _show(checks: list[Check]) -> None:
    made = table("WHERE", "CHECK", "RESULT", "FOUND", "WHAT TO DO")
    for check in checks:
        colour = _COLOURS[check.result]
        made.add_row(
            cell(check.where),
            cell(check.check),
            f"[{colour}]{check.result}[/]",
            cell(check.found),
            cell(check.todo),
        )
    console = out()
    console.print(made)
    counts = {result: sum(check.result == result for check in checks) for result in (OK, WARN, FAIL)}
    console.print(", ".join(f"{count} {result}" for result, count in counts.items()), highlight=False)


# -- settings and the state store ------------------------------------------------------------------


def _settings(place: Place) -> list[Check]:
    checks = [Check("settings", "installation", OK, place.installation)]
    local = place.state_uri.startswith(("file:", "/"))
    checks.append(
        Check(
            "settings",
            "state_uri",
            OK,
            place.state_uri,
            "every worker, triggerer and API server must see this folder, at this path" if local else "",
        )
    )
    poll = place.option("poll_interval") or "5"
    try:
        float(poll)
    except ValueError:
        checks.append(
            Check("settings", "poll_interval", FAIL, poll, "set [gpu] poll_interval to a number of seconds")
        )
    return checks


async def _state_store(place: Place) -> tuple[list[Check], bool]:
    store = place.store()
    folder = store.folder
    made = folder is not None and not folder.exists()
    allowed = place.credentials().advice(place.state_uri)
    usual = allowed or "the process that runs Airflow must be able to write here"
    checks, good = await _writes("state store", store, "[gpu] state_uri", usual)
    if good and made:
        found = f"{folder} was not there; it is now, and it is empty"
        checks.append(Check("state store", "folder", WARN, found, "is [gpu] state_uri spelled right?"))
    if good:
        try:
            count = len(await run_dirs(store, place.installation))
            checks.append(Check("state store", "run directories", OK, f"{count} of {place.installation!r}"))
        except StoreError as error:
            checks.append(
                Check(
                    "state store",
                    "run directories",
                    FAIL,
                    str(error),
                    "give the credentials the right to list",
                )
            )
            good = False
    return checks, good


async def _writes(where: str, store: Store, named_in: str, usual: str) -> tuple[list[Check], bool]:
    """Create-only writes are raced, and the store's clock is compared with ours."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(PROVE_LIMIT):
            await store.prove()
    except TimeoutError as error:
        found, todo = f"no answer within {PROVE_LIMIT:.0f} s", remedy(error, named_in, usual=usual)
        return [Check(where, "create-only writes", FAIL, found, todo)], False
    except StoreError as error:
        ignored = "create-only" in str(error)
        hint = (
            "use a store that honours create-only writes" if ignored else remedy(error, named_in, usual=usual)
        )
        return [Check(where, "create-only writes", FAIL, str(error), hint)], False
    took = time.monotonic() - begun
    slow = took > STORE_SLOW
    checks = [
        Check(
            where,
            "create-only writes",
            WARN if slow else OK,
            f"8 writers raced, one won; {took:.1f} s",
            "it is slow: a store nearer to Airflow makes every decision faster" if slow else "",
        )
    ]
    skew = await _skew(store)
    if skew is not None:
        checks.append(clock(where, skew, "the store"))
    return checks, True


async def _skew(store: Store) -> float | None:
    """Seconds by which the store's clock is ahead of ours, at least; 0 when it may be right."""
    folder = f"probe-{token_hex(8)}"
    before = time.time()
    try:
        await store.create(f"{folder}/clock", token_bytes(8))
        after = time.time()
        found = await _modified(store, f"{folder}/clock")
        return off(found, before, after)
    except StoreError:
        return None
    finally:
        try:
            await store.delete_tree(folder)
        except StoreError:
            pass


async def _modified(store: Store, path: str) -> float:
    return await store.ask(lambda reader: float(reader.head(path)["last_modified"].timestamp()), path)


# -- targets ---------------------------------------------------------------------------------------


async def _target(
    place: Place, name: str, *, job: bool, wait: float, secrets: Mapping[str, str]
) -> list[Check]:
    kind = None
    try:
        conn, where = await asyncio.to_thread(place.connections.find, name)
        kind = str(conn.conn_type)
        target = await place.target(name)
    except TargetError as error:
        kind = kind or ("" if not isinstance(error, NotConfigured) else None)
        return [Check(name, "connection", FAIL, str(error), target_remedy(error, name, kind))]
    checks = [Check(name, "connection", OK, f"{conn.conn_type}, from {where}")]
    small = small_gang(name, 0, secrets=secrets)
    offers, offered = await _offers(name, target, small)
    checks += offers
    label = {LABEL_PREFIX + "installation": installation_label(place.installation)}

    async def jobs() -> str:
        found = await bounded(target.inventory(label), name)
        return f"{sum(not listed.sighting.state.ended for listed in found)} living, {len(found)} in all"

    checks.append(
        await _tried(name, "jobs can be listed", jobs, "give the credentials the right to list jobs")
    )
    channel, good = await _channel(place, name, target)
    checks += channel
    if not job:
        checks.append(
            Check(
                name, "job", LEFT_OUT, "not tried", "--job runs a gang of one node that writes to the channel"
            )
        )
    elif not (good and offered is not None):
        checks.append(Check(name, "job", LEFT_OUT, "not tried", "what is wrong above comes first"))
    else:
        checks += await in_a_job(place, name, offered, wait)
    return checks


async def _tried(name: str, check: str, work: Callable[[], Awaitable[str]], todo: str) -> Check:
    try:
        return Check(name, check, OK, await work())
    except TargetError as error:
        return Check(name, check, FAIL, str(error), todo)


async def _offers(name: str, target: Target, small: Gang) -> tuple[list[Check], Gang | None]:
    """What it can give, and the smallest gang that it takes."""
    todo = "see whether the address is right and the system is up, and whether the credentials may look at its nodes"
    try:
        for gang in (small, replace_gpus(small, 1)):
            able = [offer for offer in await bounded(target.offers(gang), name) if not offer.reason]
            if able:
                return [Check(name, "answers", OK, _offer(able[0], gang))], gang
        refused = "; ".join(offer.reason for offer in await bounded(target.offers(small), name))
        return [
            Check(
                name, "answers", FAIL, refused or "no offer", "it takes no gang of one node: see the reason"
            )
        ], None
    except TargetError as error:
        return [Check(name, "answers", FAIL, str(error), todo)], None


def replace_gpus(gang: Gang, count: int) -> Gang:
    """The same with GPUs."""
    return Gang.from_fields({**gang.fields(), "gpus_per_node": count, "ranks_per_node": None})


def _offer(offer: Offer, gang: Gang) -> str:
    kind = f" of {offer.accelerator}" if offer.accelerator else ""
    free = "?" if offer.free_nodes is None else offer.free_nodes
    total = "?" if offer.total_nodes is None else offer.total_nodes
    return f"{free} of {total} nodes{kind} free ({offer.provisioning}, {gang.gpus_per_node} GPUs asked for)"


async def _channel(place: Place, name: str, target: Target) -> tuple[list[Check], bool]:
    known = place.credentials()
    allowed = known.advice(target.channel)
    try:
        store = place.open(target.channel)
    except StoreError as error:
        return [
            Check(name, "channel", FAIL, str(error), allowed or "set the channel in the connection")
        ], False
    checks, good = await _writes(
        name,
        store,
        f"the channel of the connection {name!r}",
        allowed or "Airflow must be able to write to the channel: check the mount, the path and the rights",
    )
    if allowed and good:
        told = ", ".join(sorted(target.job_store)) or "nothing"
        found = f"{known.words(target.channel)}; jobs log in by themselves, and are told: {told}"
        checks.insert(0, Check(name, "credentials", OK, found))
    return [replace(check, check=f"channel {target.channel}: {check.check}") for check in checks], good
