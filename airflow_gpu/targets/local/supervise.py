"""One gang that holds nodes: started, watched, given notice, killed, concluded.

Purpose: :class:`Gang` is one job in the daemon's memory; the functions here
carry it from LAUNCHING to its end. What is decided is written to
``state.json`` before it is done, so that a daemon that takes over in the
middle goes on from there.

What it does not do: choose nodes (:mod:`.schedule`), find processes
(:mod:`.processes`) or name the end (:mod:`.outcome`).

Limits: a notice may be sent twice when the daemon is killed between sending
and writing it down.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_gpu.targets.local import launch
from airflow_gpu.targets.local.evidence import killed_for_memory
from airflow_gpu.targets.local.files import JobFolder, encode, replace_file
from airflow_gpu.targets.local.outcome import RESTARTED, conclude, describe, first_bad
from airflow_gpu.targets.local.processes import Ident, Marker, alive, send
from airflow_gpu.targets.local.records import Cause, JobState, Place, Spec, Stop
from airflow_gpu.targets.local.words import Word

if TYPE_CHECKING:
    import subprocess

    from airflow_gpu.targets.local.schedule import Share

LEFTOVER = 2.0
"""Seconds for processes that an agent left behind: helpers that clean up after their parent's end."""

EMPTY_LOOKS = 2
"""Looks in a row that must find no process: one look can miss a process that is forking."""

STUCK = 5.0
"""Seconds after which processes that do not end are named to people."""

COMMANDS_KEPT = 20
KILLED_CODE = 128 + signal.SIGKILL

Members = Mapping[Ident, Marker]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Gang:
    """One job in the daemon's memory."""

    spec: Spec
    folder: JobFolder
    state: JobState
    boot: str
    line: str = ""  # why it waits; for people, not kept
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ranks_of: dict[int, int] = field(default_factory=dict)  # every pid seen in this life, and its node
    empty: int = 0
    row: str = ""  # of the table, once it has ended
    _saved: bytes = b""
    _trouble: str = ""

    def save(self) -> None:
        """Write the state down, if it differs from what is there.

        :raises OSError: it cannot be written.
        """
        data = encode(self.state.to_json())
        if data != self._saved:
            replace_file(self.folder.state, data, flush=True)
            self._saved = data

    def try_save(self) -> None:
        """Write the state down; on a full disk, next time. Not for a start: that must be down first."""
        try:
            self.save()
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("%s cannot be written down, going on: %s", self.spec.name, error)

    def become(self, word: Word, reason: str = "") -> None:
        if self.state.word is not word:
            self.state.word = word
            self.state.since = time.time()
        self.state.reason = reason

    @property
    def all_over(self) -> bool:
        return all(place.over for place in self.state.places)


def start(gang: Gang, shares: Sequence[Share]) -> None:
    """Start the gang on these nodes. First it is written down, with the number of this restart."""
    before = gang.state
    gang.state = replace(
        before,
        word=Word.LAUNCHING,
        since=time.time(),
        reason="",
        started=time.monotonic(),
        boot=gang.boot,
        places=[Place(rank, share.node, share.gpus) for rank, share in enumerate(shares)],
        stop=None,
        hosts=tuple(f"node-{share.node}" for share in shares),
        blamed=(),
    )
    try:
        launch.prepare(gang.folder, before.restart)
        gang.save()
    except BaseException:
        gang.state = before
        raise
    gang.children.clear()
    gang.ranks_of.clear()
    gang.empty = 0
    for place in gang.state.places:
        _spawn(gang, place)


def take_over(gang: Gang) -> None:
    """Go on with a gang that another daemon left, or that a restart of the machine ended."""
    state = gang.state
    if state.boot == gang.boot:
        return  # the first look does the rest
    for place in state.places:
        # Unless a cause was noted, also a bad exit code is the shutdown's: it tells everybody to end.
        if not place.over or (place.bad and state.stop is None):
            place.exit, place.lost, place.over_at = None, RESTARTED, time.monotonic()


def stop(gang: Gang, cause: Cause, grace: float, detail: str, *, notice: bool = True) -> None:
    """Have the gang end: a notice now, a kill after ``grace``. A grace that runs is never made shorter.

    Without ``notice`` it is killed at once: a machine that takes its nodes back does not ask.
    """
    now = time.monotonic()
    kill_at = now + grace if notice else now
    old = gang.state.stop
    if old is None:
        gang.state.stop = Stop(cause, now, kill_at, detail, cancelled=cause is Cause.CANCEL)
    elif not notice:
        old.notice_at, old.kill_at = min(old.notice_at, now), min(old.kill_at, now)
    elif old.notice_at > now:
        # Only the time of the other nodes after one ended was running: from here it is a grace.
        old.notice_at, old.kill_at = now, kill_at
    elif cause is Cause.CANCEL and not old.cancelled:
        old.kill_at = max(old.kill_at, kill_at)
    if cause is Cause.CANCEL and gang.state.stop is not None:
        gang.state.stop.cancelled = True
    gang.become(Word.STOPPING, gang.state.stop.detail if gang.state.stop else detail)


def lose_node(gang: Gang, node: int, why: str) -> None:
    """Take note that a node of the cluster is gone, with what the gang has there."""
    for place in gang.state.places:
        if place.node == node and not place.over:
            launch.fence(gang.folder, gang.state.restart, place)
            _lose(place, why)


def advance(gang: Gang, members: Members | None) -> None:
    """One look at the gang, and what follows from it.

    :param members: its living processes, from a census taken after the last call; None when
        none was taken this time.
    """
    _look(gang)
    _note_causes(gang)
    state = gang.state
    if gang.all_over and state.word is not Word.STOPPING:
        gang.become(Word.STOPPING, state.reason)
    elif state.word is Word.LAUNCHING and all(place.agent or place.over for place in state.places):
        gang.become(Word.RUNNING)
    if state.stop is not None and time.monotonic() >= state.stop.kill_at:
        state.stop.killed = True
    gang.try_save()
    _give_notice(gang)
    if members is None:
        return
    for ident, marker in members.items():
        gang.ranks_of[ident.pid] = marker.rank
    _kill(gang, members)
    gang.empty = gang.empty + 1 if gang.all_over and not members else 0
    if gang.empty >= EMPTY_LOOKS:
        _finish(gang)
    gang.try_save()


def wants_census(gang: Gang) -> bool:
    """Whether processes must be looked for now, not only once in a while."""
    now = time.monotonic()
    if gang.all_over or (gang.state.stop is not None and now >= gang.state.stop.kill_at):
        return True
    # Those who were left behind on a node that is over are gone soon; later a look now and then will do.
    return any(place.over and now - (place.over_at or 0.0) < 2 * LEFTOVER for place in gang.state.places)


def about_to_end(gang: Gang) -> bool:
    """Whether the end can be seen any moment: worth looking often, for a while."""
    ends = [place.over_at or 0.0 for place in gang.state.places]
    return gang.all_over and time.monotonic() - max(ends, default=0.0) < LEFTOVER


def kill(members: Members, ranks: frozenset[int] | None = None) -> None:
    """SIGKILL the processes of these nodes of a gang (None: all)."""
    for ident, marker in members.items():
        if ranks is None or marker.rank in ranks:
            send(ident, signal.SIGKILL)


def end_waiting(gang: Gang, word: Word, reason: str) -> None:
    """End a job that holds nothing."""
    _forget_secrets(gang)
    gang.become(word, reason)
    gang.state.ended_at = time.time()
    gang.try_save()


# -- what happened ---------------------------------------------------------------------------


def _look(gang: Gang) -> None:
    """Take note of claims, agents and ends."""
    spec, folder, restart = gang.spec, gang.folder, gang.state.restart
    for place in gang.state.places:
        if place.over or _take_exit(gang, place):
            continue
        if place.shim is None:
            # In this order: a claim that appears between the two questions must not look like one who left.
            if not launch.claimed(folder, restart, place):
                _look_before_claim(gang, place)
                continue
            place.shim = launch.read_claim(folder, spec, restart, place)
        if place.agent is None:
            place.agent = launch.read_agent(folder, spec, restart, place)
        if place.shim is not None and alive(Ident(*place.shim)):
            continue
        # It was there and is gone. It may have written its exit code after we looked for it.
        if not _take_exit(gang, place):
            _end_without_code(gang, place, "vanished: its processes are gone without an exit code")
    for child in gang.children.values():
        child.poll()  # so that none stays a zombie


def _look_before_claim(gang: Gang, place: Place) -> None:
    """A node that nobody has started yet, as far as the files say."""
    child = gang.children.get(place.rank)
    if gang.state.stop is not None and gang.state.stop.killed:
        if launch.fence(gang.folder, gang.state.restart, place):
            _end_without_code(gang, place, "")
    elif child is None:
        _spawn(gang, place)  # another daemon was killed in the middle of a start
    elif (code := child.poll()) is not None and launch.fence(gang.folder, gang.state.restart, place):
        _lose(place, f"could not be started: its shell ended with {code}")


def _take_exit(gang: Gang, place: Place) -> bool:
    found = launch.read_exit(gang.folder, gang.state.restart, place)
    if found is None:
        return False
    place.exit, place.ended_at = found
    place.over_at = time.monotonic()
    if place.shim is None:
        place.shim = launch.read_claim(gang.folder, gang.spec, gang.state.restart, place)
    return True


def _end_without_code(gang: Gang, place: Place, why: str) -> None:
    if gang.state.stop is not None and gang.state.stop.killed:
        place.killed = True
        place.over_at, place.ended_at = time.monotonic(), time.time()
    else:
        _lose(place, why)


def _lose(place: Place, why: str) -> None:
    place.lost = why
    place.over_at, place.ended_at = time.monotonic(), time.time()


def _note_causes(gang: Gang) -> None:
    """Find out whether the gang is to end by itself: a node ended badly, or its time is over."""
    state, spec = gang.state, gang.spec
    if state.stop is not None or not state.places:
        return
    bad = first_bad(state)
    now = time.monotonic()
    if bad is not None:
        state.stop = Stop(
            Cause.NODE_ENDED, now + spec.straggler, now + spec.straggler + spec.grace, describe(bad)
        )
        gang.become(
            Word.STOPPING, f"{describe(bad)}; the others have {spec.straggler:g} s to end by themselves"
        )
    elif not gang.all_over and state.started is not None and now - state.started >= spec.time_limit:
        stop(gang, Cause.TIME_LIMIT, spec.grace, f"the time limit of {spec.time_limit:g} s is over")


# -- what is done ----------------------------------------------------------------------------


def _spawn(gang: Gang, place: Place) -> None:
    """Start a node. Doing it again does not start it twice."""
    try:
        gang.children[place.rank] = launch.spawn(gang.spec, gang.folder, gang.state.restart, place)
    except OSError as error:
        if launch.fence(gang.folder, gang.state.restart, place):
            _lose(place, f"could not be started: {error}")


def _give_notice(gang: Gang) -> None:
    """SIGTERM to the agents, and to nobody else: they tell their ranks."""
    end = gang.state.stop
    if end is None or end.killed or time.monotonic() < end.notice_at:
        return
    for place in gang.state.places:
        if place.agent is not None and not place.noticed and not place.over:
            send(Ident(*place.agent), signal.SIGTERM)
            place.noticed = True
    gang.try_save()


def _kill(gang: Gang, members: Members) -> None:
    now = time.monotonic()
    state = gang.state
    if state.stop is not None and state.stop.killed:
        kill(members)
    else:
        # An agent ends after its ranks. What is there now was left by one that was killed, or hides.
        left = {
            place.rank
            for place in state.places
            if place.over and (place.lost or now - (place.over_at or 0.0) >= LEFTOVER)
        }
        kill(members, frozenset(left))
        # A shell that has written its exit code waits for this, once nobody is left whom it is parent of.
        for place in state.places:
            on_node = [ident for ident, marker in members.items() if marker.rank == place.rank]
            if place.over and place.shim is not None and on_node == [Ident(*place.shim)]:
                send(on_node[0], signal.SIGKILL)
    if gang.all_over and members and now - max(place.over_at or now for place in state.places) >= STUCK:
        pids = ", ".join(str(ident.pid) for ident in sorted(members)[:5])
        gang.become(Word.STOPPING, f"was killed, but {len(members)} processes are still there: {pids}")


def _finish(gang: Gang) -> None:
    """No process is left: name the end."""
    state = gang.state
    for child in gang.children.values():
        child.poll()
    ending = conclude(gang.spec, state, _out_of_memory(gang))
    log.info("%s (restart %d): %s %s", gang.spec.name, state.restart, ending.word, ending.reason)
    if ending.again:
        gang.state = replace(
            state,
            restart=state.restart + 1,
            places=[],
            stop=None,
            started=None,
            hosts=(),
            blamed=(),
            boot="",
        )
    else:
        _forget_secrets(gang)
        state.ended_at = time.time()
        state.blamed = ending.blamed
    gang.children.clear()
    gang.become(ending.word, ending.reason)


def _out_of_memory(gang: Gang) -> frozenset[int]:
    """Ranks of nodes that lost a process to the kernel's want of memory."""
    if not any(place.exit == KILLED_CODE for place in gang.state.places):
        return frozenset()
    victims = killed_for_memory(gang.state.started or 0.0)
    return frozenset(rank for pid, rank in gang.ranks_of.items() if pid in victims)


def _forget_secrets(gang: Gang) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(gang.folder.secrets)
