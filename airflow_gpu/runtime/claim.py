"""The job claims its own life: the next entry of ``lives/``, or it leaves.

Purpose: nothing computes twice. A claim and a fence create the *same next
file*, so they cannot both succeed; a twin that was submitted anyway, a job that
starts after its successor, a second start of the same restart: each finds an
entry that tells it to leave. The rules are in ``docs/run-directory.md``.

Limits: an entry that cannot be read (a writer that died half-way on a store
without hard links) might be a fence, so it makes the claim fail.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from airflow_gpu.runtime.checkpoint import VERIFY_SECONDS, Ancestor, Start, choose, life_folder
from airflow_gpu.runtime.files import Channel, Exists, Missing, Torn, read_json, to_json
from airflow_gpu.runtime.interval import observed_mtbf
from airflow_gpu.runtime.job import Job, Node, Seed
from airflow_gpu.runtime.pruning import LIVES, pin, taken, unpin
from airflow_gpu.runtime.words import VERSION, parse_utc, utc

LOOK_AGAIN = 0.25
"""Seconds between a node's looks for the life that node 0 claims."""

AT_A_STORE = 6
"""So many times less often where each look is a request that costs money."""

VERIFY_SHARE = 0.25
"""Of the barrier's time-out: what a claim may spend on hashing at most, since the other nodes wait meanwhile."""

UPTIMES = 20
"""So many earlier lives tell how often the gang is interrupted."""


class NotClaimed(Exception):
    """This job must not compute. The message says which entry says so."""


class AlreadyDone(Exception):
    """An earlier life of this attempt has succeeded. A platform may start a gang again that exits 0 in its grace."""


class NoLife(Exception):
    """Node 0 claimed no life in time."""


@dataclass(frozen=True)
class Entry:
    """One entry of ``lives/``, of whatever kind."""

    number: int
    kind: str
    attempt: int
    job: str
    restart: int
    control: str
    start: Optional[Tuple[int, int]]
    reason: str = ""
    nodes: int = 0
    processes: int = 0
    by: str = ""
    at: float = 0.0  # when it was claimed, by the clock of that node; 0 where it does not say
    grace: float = 0.0  # of a fence: seconds in which a life that runs may save

    @property
    def where(self) -> str:
        return f"{LIVES}/{self.number:04d}.json"


@dataclass(frozen=True)
class Claim:
    """A life that is ours. ``token`` opens its control channel; ``ancestors`` are the lives on its chain."""

    life: int
    control: str
    token: str
    start: Optional[Start] = None
    ancestors: Tuple[int, ...] = ()
    earlier: Tuple[int, ...] = ()  # all lives whose checkpoints count, also those that the chain has left
    mtbf: Optional[float] = None  # seconds between interruptions, by what happened to the lives before

    @property
    def folder(self) -> str:
        return life_root(self.life)


def life_root(life: int) -> str:
    """Below the channel: what belongs to one life."""
    return f"{LIVES}/{life:04d}"


def token_name(life: int) -> str:
    """Where the secret of a life's control channel is; only the job's own user may read it."""
    return f"{life_root(life)}/token"


def entries(channel: Channel, known: Optional[Dict[int, Entry]] = None) -> List[Entry]:
    """All entries in order. Raises NotClaimed when one cannot be read.

    ``known``: what was read before, which stays as it is; added to.
    """
    found = []
    known = {} if known is None else known
    for number in taken(channel):
        name = f"{LIVES}/{number:04d}.json"
        try:
            if number not in known:
                known[number] = _entry(number, read_json(channel, name))
            found.append(known[number])
        except (Torn, Missing, KeyError, TypeError, ValueError):
            raise NotClaimed(f"{name} cannot be read; it may be a fence") from None
    return found


def _entry(number: int, body: Dict[str, Any]) -> Entry:
    start = body.get("from")
    return Entry(
        number=number,
        kind=str(body.get("kind", "")),
        attempt=int(body["attempt"]),
        job=str(body.get("job", "")),
        restart=int(body.get("restart", 0)),
        control=str(body.get("control", "")),
        start=(int(start["life"]), int(start["step"])) if start and not start.get("seed") else None,
        reason=str(body.get("reason", "")),
        nodes=int(body.get("nodes", 0)),
        by=str(body.get("by", "")),
        processes=int(body.get("processes", 0)),
        grace=float(body.get("grace") or 0.0),
        at=_moment(body.get("at")),
    )


def _moment(text: Any) -> float:
    try:
        return parse_utc(str(text))
    except ValueError:
        return 0.0  # it decides nothing


def refuse(found: List[Entry], job: Job, node: Node) -> None:
    """Rules 3 and 4. Raises NotClaimed."""
    for entry in found:
        if entry.attempt > job.attempt:
            raise NotClaimed(
                f"attempt {job.attempt} is over: {entry.where} belongs to attempt {entry.attempt}"
            )
        if entry.kind == "fence" and entry.attempt >= job.attempt:
            raise NotClaimed(
                f"attempt {job.attempt} is fenced by {entry.where} ({entry.reason or 'no reason given'})"
            )
        if entry.kind == "life" and entry.attempt == job.attempt:
            if entry.job != node.job_id:
                raise NotClaimed(f"job {node.job_id} is a twin: {entry.where} was claimed by job {entry.job}")
            if node.restart is None:
                if entry.by == node.start:
                    raise NotClaimed(f"this very start has claimed {entry.where} already")
                continue
            if entry.restart >= node.restart:
                raise NotClaimed(
                    f"restart {node.restart} of job {node.job_id} comes too late: "
                    f"{entry.where} was claimed by its restart {entry.restart}"
                )


def already_done(channel: Channel, found: List[Entry], job: Job) -> None:
    """Rule 2. Raises AlreadyDone when the newest life of this attempt has a record of success from every rank."""
    lives = [entry for entry in found if entry.kind == "life" and entry.attempt == job.attempt]
    if not lives:
        return
    last, count = lives[-1], 0
    for node in range(last.nodes):
        try:
            ranks = read_json(channel, f"{life_root(last.number)}/nodes/{node:04d}.json")["ranks"]
            if any(rank["exit_code"] != 0 for rank in ranks):
                return  # at the first: every waiting node asks, again and again
        except (Missing, Torn, KeyError, TypeError):
            return
        count += len(ranks)
    if 0 < count == last.processes:
        raise AlreadyDone(f"life {last.number} has succeeded: there is nothing left to do")


def ancestors_of(found: List[Entry], job: Job) -> List[Ancestor]:
    """The earlier lives whose checkpoints count, in order.

    With ``resume: false`` the attempt starts from nothing, but a restart of
    this same attempt by its platform still goes on from the attempt's own lives.
    Lives from before the run went elsewhere are behind the seed that it brings back.
    """
    behind = max(job.seed.life if job.seed is not None and not job.seed.run else 0, job.since - 1)
    lives = [
        e
        for e in found
        if e.kind == "life" and e.number > behind and (job.resume or e.attempt == job.attempt)
    ]
    return [Ancestor(e.number, *(e.start or (None, None))) for e in lives]


def claim(
    channel: Channel,
    job: Job,
    node: Node,
    control: str,
    report: Callable[[str], None],
    seed: Optional[Channel] = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Claim:
    """Claim the next life for node 0, whose control channel listens at ``control`` (``host:port``).

    ``seed``: the channel of the job's seed, where it has one; ``interrupted``: nothing is to be claimed any more.

    Raises AlreadyDone, NotClaimed, OSError.
    """
    chosen_for: Optional[List[Ancestor]] = None
    start: Optional[Start] = None
    while True:
        found = entries(channel)
        already_done(channel, found, job)
        refuse(found, job, node)
        number = max([job.first_life, *(entry.number + 1 for entry in found)])
        ancestors = ancestors_of(found, job)
        if ancestors != chosen_for:  # hashing is dear: again only when a life came in between
            seconds = min(VERIFY_SECONDS, VERIFY_SHARE * job.barrier_timeout)
            start, chosen_for = choose(channel, ancestors, report, seconds), ancestors
            if start is None and job.seed is not None and seed is not None:
                start = planted(seed, job.seed, report, seconds)
            continue  # the log may have moved on meanwhile
        body = {
            "v": VERSION,
            "kind": "life",
            "life": number,
            "at": utc(),
            "attempt": job.attempt,
            "job": node.job_id,
            "restart": _next_restart(found, job) if node.restart is None else node.restart,
            "by": node.start,
            "nodes": job.nodes,
            "world_size": job.world_size,
            "processes": job.processes,
            "launch": job.launch,
            "from": start.to_dict() if start else None,
            "control": control,
        }
        if interrupted():
            raise NotClaimed("a notice came before a life was claimed")
        pinned = start if start is not None and not start.seed else None
        if pinned is not None and not pin(channel, number, pinned, ancestors):
            report(f"checkpoint {pinned.folder} is just being removed; choosing again")
            chosen_for = None
            continue
        try:
            channel.create(f"{LIVES}/{number:04d}.json", to_json(body))
        except Exists:
            continue
        finally:
            if pinned is not None:
                unpin(channel, number, pinned)
        # Beside the life and not in it: Airflow's side reads lives, perhaps as
        # another user, and the secret is for this job's user only.
        token = secrets.token_hex(32)
        channel.create(token_name(number), token.encode(), private=True)
        for folder in (f"{life_root(number)}/nodes", f"{life_root(number)}/logs", life_folder(number)):
            channel.folder(folder)
        mtbf = None if job.mtbf is None else observed_mtbf(job.mtbf, uptimes(channel, found))
        earlier = tuple(ancestor.life for ancestor in ancestors)
        return Claim(number, control, token, start, _chain(ancestors), earlier, mtbf)


def uptimes(channel: Channel, found: List[Entry]) -> List[float]:
    """How long the latest earlier lives ran, in seconds, by the progress that they last told of."""
    seconds = []
    for life in [e for e in found if e.kind == "life" and e.at][-UPTIMES:]:
        try:
            told = parse_utc(str(read_json(channel, f"{life_root(life.number)}/progress.json", 0.0)["at"]))
        except (Missing, Torn, KeyError, ValueError):
            told = life.at
        seconds.append(max(0.0, told - life.at))
    return seconds


def entry(channel: Channel, number: int) -> Optional[Entry]:
    """One entry; None when it cannot be read."""
    try:
        return _entry(number, read_json(channel, f"{LIVES}/{number:04d}.json"))
    except (Torn, Missing, KeyError, TypeError, ValueError):
        return None


def superseded(channel: Channel, life: int, attempt: int) -> Optional[Tuple[int, Optional[Entry]]]:
    """The newest entry that ends this life of this attempt, by its number; None: there is none.

    A later life, or a fence of this attempt or a later one. A fence of an earlier attempt, which somebody wrote who
    had slept, says nothing of this one. What cannot be read may be a fence.
    """
    for number in reversed([number for number in taken(channel) if number > life]):
        found = entry(channel, number)
        if found is None or found.kind != "fence" or found.attempt >= attempt:
            return number, found
    return None


def since_begun(channel: Channel, earlier: Sequence[int]) -> List[int]:
    """Of these lives, in order, the newest whose ranks have begun, and those after it. Raises OSError."""
    found: List[int] = []
    for life in reversed(earlier):
        found.append(life)
        root = life_root(life)
        if channel.exists(f"{root}/local.json") or channel.exists(f"{root}/progress.json"):
            break
        if channel.names(f"{root}/nodes"):
            break
    return found


def planted(there: Channel, seed: Seed, report: Callable[[str], None], seconds: float) -> Start:
    """The checkpoint of another channel, opened as ``there``, to begin from.

    Raises NotClaimed when there is none that this node can read: Airflow's side
    saw one, so a start from nothing would throw work away in silence.
    """
    lives = [e for e in entries(there) if e.kind == "life" and e.number <= seed.life]
    chain = [Ancestor(e.number, *(e.start or (None, None))) for e in lives]
    # Of another run the newest of that life will do: the step that Airflow's side saw may be pruned by now.
    limit = None if seed.run else seed.step
    start = choose(there, chain, report, seconds, limit) if chain else None
    if start is None:
        raise NotClaimed(
            f"the checkpoint to go on from (step {seed.step}, {seed.channel}) cannot be read on this node"
        )
    return replace(start, seed=True)


def _next_restart(found: List[Entry], job: Job) -> int:
    """For a platform that does not count its restarts: one more than any life of the attempt has."""
    return 1 + max((e.restart for e in found if e.kind == "life" and e.attempt == job.attempt), default=-1)


def _chain(ancestors: List[Ancestor]) -> Tuple[int, ...]:
    """Lives that this one descends from, the newest first; also those that saved nothing, or only half of one."""
    by_number = {ancestor.life: ancestor for ancestor in ancestors}
    chain: List[int] = []
    at: Optional[int] = ancestors[-1].life if ancestors else None
    while at is not None and at not in chain:
        chain.append(at)
        ancestor = by_number.get(at)
        at = ancestor.start_life if ancestor is not None else None
    return tuple(chain)


def await_life(
    channel: Channel, job: Job, node: Node, until: float, interrupted: Callable[[], bool], after: int = 0
) -> Optional[Claim]:
    """For the other nodes: the life that node 0 of this very start claims.

    ``until``: of ``time.monotonic``; ``after``: only a life with a higher number will do. Answers None when ``interrupted`` says so.
    Raises NoLife when it takes longer, AlreadyDone or NotClaimed when this start must leave.
    """
    known: Dict[int, Entry] = {}
    pause = LOOK_AGAIN if channel.shared else LOOK_AGAIN * AT_A_STORE
    while not interrupted():
        found = entries(channel, known)
        mine = [
            entry
            for entry in found
            if (entry.kind, entry.attempt, entry.job) == ("life", job.attempt, node.job_id)
            and node.restart in (None, entry.restart)
            and entry.number > after
        ]
        if not mine:
            already_done(channel, found, job)
            refuse(found, job, node)
        elif over := superseded(channel, mine[-1].number, job.attempt):
            raise NotClaimed(f"{mine[-1].where} is over: {LIVES}/{over[0]:04d}.json came after it")
        else:
            try:
                token = channel.read(token_name(mine[-1].number)).decode()
                return Claim(mine[-1].number, mine[-1].control, token)
            except Missing:
                pass  # node 0 writes it right after the life
        if time.monotonic() >= until:
            raise NoLife(f"node 0 claimed no life for restart {node.restart} of job {node.job_id}")
        time.sleep(pause)
    return None
