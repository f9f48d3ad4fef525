"""Runs on the real local target: what happens to each, and who follows a process that was killed.

Purpose: :class:`Stage` has the cluster and the zygote; :meth:`Stage.play` plays
one :class:`Plan`: a story, the process that is spoilt, the call and the kind of
fault. Like Airflow it starts a successor for a process that died (the same try
driven by another process, or the next try), and a second one while a process
stands still.

What it does not do: judge, see ``ledger.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from airflow_gpu.gang.identity import RunKey, slot_path
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.local import Admin, LocalTarget
from airflow_gpu.targets.local.admin import AdminError
from tests.faults.real.bare import Errand, config

LOOK = 0.05
PATIENCE = 90.0
"""Seconds that a run may take on a busy machine; it measures nothing."""

STAND_STILL = 1.5
"""Seconds for which a stopped process stands still."""

PROGRAM = r"""
cd "$MARKS"
exec 9>>"lock.$RANK"
flock -n 9 || echo "twice $GANG_LIFE $RANK" >> truth
trap 'exit 75' TERM
n=$GANG_RESTORE_STEP
echo "begin $GANG_LIFE $RANK $n" >> truth
while [ "$n" -lt "$STEPS" ]; do
  sleep "$PACE" 9>&-
  n=$((n + 1))
  if [ "$RANK" = 0 ]; then
    mkdir -p "$GANG_CHECKPOINT_DIR/step-$n"
    echo "$n" > "$GANG_CHECKPOINT_DIR/step-$n/n"
    touch "$GANG_CHECKPOINT_DIR/step-$n/.complete"
    echo "$n" > "step.$GANG_LIFE"
  fi
  if [ -n "$FAILS" ] && [ "$n" = 2 ] && [ "$RANK" = 0 ] && mkdir failed 2>/dev/null; then
    exit 3
  fi
done
echo "done $GANG_LIFE $RANK" >> truth
"""
"""Counts some steps and saves after each. The lock tells whether another life of this rank computes: the kernel
lets go of it when the process is dead, and not before."""


@dataclass(frozen=True)
class Story:
    """``steps`` of ``pace`` seconds; ``event`` happens when the first life has got to its second step."""

    name: str
    event: str = ""  # preempt, preempt-hard, clear, mark, hand-over
    nodes: int = 1
    steps: int = 6
    pace: float = 0.05
    fails: bool = False
    twice: bool = False  # two drivers from the start


STORIES = (
    Story("success"),
    Story("success of two nodes", nodes=2),
    Story("error, then retry", fails=True),
    Story("preempted with notice", event="preempt", steps=12, pace=0.2),
    Story("preempted without", event="preempt-hard", steps=12, pace=0.2),
    Story("clear", event="clear", steps=12, pace=0.2),
    Story("mark failed", event="mark", steps=5000),
    Story("hand-over, both alive", event="hand-over", steps=12, pace=0.1),
    Story("two drivers from the start", twice=True),
)


@dataclass(frozen=True)
class Plan:
    """One run: ``victim`` is the process that is spoilt, counted from 0 in the order of their starts."""

    number: int
    story: Story
    victim: int = 0
    op: str = ""
    k: int = 0
    kind: str = ""
    next_try: bool = False  # who follows a killed process: the next try, or the same one driven by another

    @property
    def run(self) -> str:
        return f"run-{self.number:05d}"


@dataclass
class Played:
    """What became of a plan."""

    plan: Plan
    told: list[dict[str, Any]] = field(default_factory=list)
    killed: int = 0
    stalled: int = 0
    processes: int = 0
    marked_at: float | None = None
    ended: bool = False
    trouble: str = ""
    seconds: float = 0.0


class Stage:
    """One cluster folder for all runs, and the process from which their drivers are forked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = LocalTarget("here", config(str(root)))
        self.admin = Admin(root / "cluster")
        self._ids = 0
        self._heard: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._zygote: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stage:
        (self.root / "marks").mkdir(parents=True, exist_ok=True)
        self._zygote = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.real.zygote",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reader = asyncio.create_task(self._listen())
        # The cluster and its daemon are there before the first run.
        await self.target.inventory({})
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        await self._zygote.wait()
        if self._reader is not None:
            self._reader.cancel()
        await asyncio.to_thread(self.admin.stop, gangs=True)

    async def _listen(self) -> None:
        assert self._zygote is not None
        assert self._zygote.stdout is not None
        async for line in self._zygote.stdout:
            event = json.loads(line)
            self._heard[event["id"]].put_nowait(event)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(command).encode() + b"\n")

    def start(self, errand: Errand) -> Process:
        """Fork a process for this errand."""
        self._ids += 1
        name = str(self._ids)
        self._heard[name] = asyncio.Queue()
        self._send({"id": name, "errand": asdict(errand)})
        return Process(self, name, self._heard[name])

    def signal(self, name: str, number: int) -> None:
        self._send({"id": name, "signal": number})

    # -- one run -----------------------------------------------------------------------------------

    async def play(self, plan: Plan, calls: str = "") -> Played:
        """Play a plan to its end."""
        begun = time.monotonic()
        played = Played(plan)
        try:
            async with asyncio.timeout(PATIENCE):
                await _Run(self, plan, played, calls).play()
        except TimeoutError:
            played.trouble = f"not over within {PATIENCE:.0f} s"
        path = self.root / "marks" / plan.run / "told"
        if path.exists():
            played.told = [json.loads(line) for line in path.read_text().splitlines()]
        played.seconds = time.monotonic() - begun
        return played


@dataclass
class Process:
    """One forked driver, as its parent hears of it."""

    stage: Stage
    name: str
    heard: asyncio.Queue[dict[str, Any]]
    over: str = ""

    async def event(self) -> str:
        """``stopped``, ``killed`` or ``ended``."""
        what = str((await self.heard.get())["what"])
        if what != "stopped":
            self.over = what
        return what

    def kill(self) -> None:
        self.stage.signal(self.name, signal.SIGKILL)


class _Run:
    """Plays Airflow for one run."""

    def __init__(self, stage: Stage, plan: Plan, played: Played, calls: str) -> None:
        self.stage, self.plan, self.played, self.calls = stage, plan, played, calls
        self.marks = stage.root / "marks" / plan.run
        self.marks.mkdir(parents=True)
        self.number, self.max_tries = 1, 3
        self.over = asyncio.Event()
        self.stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        story = plan.story
        self.gang = Gang(
            nodes=story.nodes,
            gpus_per_node=1,
            script=PROGRAM,
            targets="here",
            stop_grace=3,
            env={
                "MARKS": str(self.marks),
                "STEPS": str(story.steps),
                "PACE": str(story.pace),
                "FAILS": "1" if story.fails else "",
            },
            recovery={"backoff": 0.2, "backoff_max": 0.2},
            secrets={"TOKEN": "conn:hub#password"},
        )

    async def play(self) -> None:
        self.drive()
        if self.plan.story.twice:
            self.drive()
        event = asyncio.create_task(self.event())
        try:
            await self.over.wait()
        finally:
            event.cancel()
            for task in self._tasks:
                task.cancel()
        self.played.ended = True

    def errand(self, role: str = "drive") -> Errand:
        victim = self.played.processes == self.plan.victim
        self.played.processes += 1
        return Errand(
            root=str(self.stage.root),
            run=self.plan.run,
            gang=self.gang.to_json(),
            ti_id=f"ti-{self.number}",
            try_number=self.number,
            max_tries=self.max_tries,
            role=role,
            op=self.plan.op if victim else "",
            k=self.plan.k if victim else 0,
            kind=self.plan.kind if victim else "",
            calls=f"{self.calls}.{self.played.processes - 1}" if self.calls else "",
        )

    def drive(self, role: str = "drive") -> Process:
        process = self.stage.start(self.errand(role))
        self._spawn(self.watch(process, role, self.number))
        return process

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self, process: Process, role: str, number: int) -> None:
        """Wait for the end of a process; see to a successor."""
        while True:
            what = await process.event()
            if what == "stopped":
                self.played.stalled += 1
                if number == self.number:
                    self.drive(role)  # another one does it meanwhile
                await asyncio.sleep(STAND_STILL)
                self.stage.signal(process.name, signal.SIGCONT)
                continue
            break
        if number != self.number or self.over.is_set():
            return
        if what == "killed":
            self.played.killed += 1
            if self.stopping and role == "drive":
                return
            await asyncio.sleep(0.1)
            if self.plan.next_try and role == "drive":
                self.number += 1
            self.drive(role)
            return
        if self.stopping and role != "stop":
            return
        told = self.last_told()
        if role == "drive" and told.get("outcome") in ("failed", "cancelled", None) and number < 4:
            self.number += 1  # Airflow retries
            self.drive()
            return
        self.over.set()

    def last_told(self) -> dict[str, Any]:
        path = self.marks / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(json.loads(lines[-1])) if lines else {}

    # -- what happens to it --------------------------------------------------------------------------

    async def event(self) -> None:
        kind = self.plan.story.event
        if not kind:
            return
        await self.step(2)
        if kind in ("preempt", "preempt-hard"):
            name = self.job()
            if name:
                try:
                    await asyncio.to_thread(self.stage.admin.preempt, name, kind == "preempt")
                except AdminError:
                    pass  # it has ended just now
        elif kind == "hand-over":
            self.drive()
        elif kind == "clear":
            self.number += 1
            self.max_tries += 1
            self.drive()
        elif kind == "mark":
            self.stopping = True
            self.played.marked_at = time.time()
            self.drive("stop")

    async def step(self, number: int) -> None:
        """Until some life has made so many steps."""
        while True:
            for path in self.marks.glob("step.*"):
                text = path.read_text().strip()
                if text.isdigit() and int(text) >= number:
                    return
            await asyncio.sleep(LOOK)

    def job(self) -> str:
        """The newest job of this run that holds nodes."""
        label = self.plan.run
        rows = self.stage.admin.status()["jobs"]
        held = [
            name
            for name, row in rows.items()
            if row.get("held") and row["labels"].get("airflow-gpu/run") == label
        ]
        return held[-1] if held else ""


Calls = dict[str, list[tuple[int, str, int, tuple[str, ...]]]]
"""By story: process, name of the call, how many of that name there were, and the kinds of faults for it."""


async def record(stage: Stage, story: Story, number: int) -> Calls:
    """A run without faults: which calls its processes make."""
    log = stage.root / f"calls-{number}"
    played = await stage.play(Plan(number, story), calls=str(log))
    assert played.ended, f"{story.name}, without any fault: {played.trouble} {played.told}"
    found: dict[tuple[int, str], tuple[int, tuple[str, ...]]] = {}
    for path in sorted(stage.root.glob(f"{log.name}.*")):
        for line in path.read_text().splitlines():
            op, count, kinds = json.loads(line)
            found[int(path.suffix[1:]), op] = count, tuple(kinds)
    return {story.name: [(process, op, count, kinds) for (process, op), (count, kinds) in found.items()]}


def plans(count: int, seed: int, calls: Calls) -> list[Plan]:
    """So many plans: the stories in turn; process, call and fault by chance, rare calls as often as frequent ones."""
    rng = random.Random(seed)
    found = []
    for number in range(1, count + 1):
        story = STORIES[number % len(STORIES)]
        victim, op, most, kinds = rng.choice(calls[story.name])
        k = min(most, rng.choice((1, 1, 2, 3, rng.randint(1, most))))
        found.append(Plan(number, story, victim, op, k, rng.choice(kinds), rng.random() < 0.5))
    return found


def key_of(plan: Plan) -> RunKey:
    return RunKey("faults", "dag", plan.run, "fit", -1)


def slot_of(plan: Plan) -> str:
    return slot_path(key_of(plan))


__all__ = ["STORIES", "Calls", "Plan", "Played", "Stage", "Story", "key_of", "plans", "record", "slot_of"]
