"""The scheduler's rules, by example and by property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu.targets.local.schedule import (
    GIB,
    Action,
    Evict,
    Free,
    Job,
    Node,
    Request,
    Share,
    Start,
    Wait,
    accelerator_matches,
    impossible,
    schedule,
)


def nodes(count: int = 2, gpus: int = 4, **fields: Any) -> list[Node]:
    return [
        replace(
            Node(i, f"node-{i}", tuple(range(i * gpus, (i + 1) * gpus)), 8.0, 32 * GIB, "H100"),
            **fields,
        )
        for i in range(count)
    ]


def waiting(name: str, order: int, count: int = 1, gpus: int = 4, priority: int = 0, **fields: object) -> Job:
    return Job(name, order, Request(count, gpus, **fields), priority)  # type: ignore[arg-type]


def holding(
    job: Job, *shares: tuple[int, tuple[int, ...]], started: float = 0.0, stopping: bool = False
) -> Job:
    return replace(job, held=tuple(Share(n, g) for n, g in shares), started=started, stopping=stopping)


def names(actions: Sequence[Action], kind: type[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, kind)]


def test_starts_on_distinct_nodes_or_not_at_all() -> None:
    assert schedule(nodes(), [waiting("a", 1, 2)]) == [
        Start("a", (Share(0, (0, 1, 2, 3)), Share(1, (4, 5, 6, 7))))
    ]
    busy = holding(waiting("b", 1, 1, 1), (1, (4,)))
    assert names(schedule(nodes(), [busy, waiting("a", 2, 2)]), Start) == []


def test_gangs_share_a_node_where_its_gpus_allow() -> None:
    actions = schedule(nodes(1), [waiting("a", 1, gpus=2), waiting("b", 2, gpus=2), waiting("c", 3, gpus=1)])
    assert actions[:2] == [Start("a", (Share(0, (0, 1)),)), Start("b", (Share(0, (2, 3)),))]
    assert names(actions, Wait) == ["c"]


def test_the_fullest_node_is_taken_first() -> None:
    busy = holding(waiting("b", 1, gpus=2), (1, (4, 5)))
    assert schedule(nodes(), [busy, waiting("a", 2, gpus=2)]) == [Start("a", (Share(1, (6, 7)),))]


def test_the_first_that_does_not_fit_holds_the_line() -> None:
    busy = holding(waiting("b", 1), (0, (0, 1, 2, 3)))
    actions = schedule(nodes(), [busy, waiting("big", 2, 2), waiting("small", 3, gpus=1)])
    assert actions == [
        Wait("big", "waits for 2 nodes with 4 free GPUs; 1 now"),
        Wait("small", "behind big, which is first in line"),
    ]


def test_one_that_could_not_start_on_an_empty_cluster_does_not_hold_it() -> None:
    part = [nodes()[0], replace(nodes()[1], usable=False)]
    actions = schedule(part, [waiting("big", 1, 2), waiting("small", 2, gpus=1)])
    assert actions == [
        Wait("big", "the nodes it needs are down or drained"),
        Start("small", (Share(0, (0,)),)),
    ]


def test_priority_goes_before_order() -> None:
    actions = schedule(nodes(1), [waiting("first", 1), waiting("urgent", 2, priority=1)])
    assert names(actions, Start) == ["urgent"]


def test_evicts_the_lowest_then_the_youngest_and_no_more_than_needed() -> None:
    running = [
        holding(waiting("old", 1, gpus=2, priority=1), (0, (0, 1)), started=1),
        holding(waiting("young", 2, gpus=2, priority=1), (0, (2, 3)), started=9),
        holding(waiting("low", 3, gpus=2), (1, (4, 5)), started=5),
    ]
    assert names(schedule(nodes(), [*running, waiting("u", 4, gpus=4, priority=2)]), Evict) == ["low"]
    # On the other node nothing is gained by evicting "low": it is spared.
    walled = [*running, holding(waiting("top", 5, gpus=2, priority=9), (1, (6, 7)))]
    assert names(schedule(nodes(), [*walled, waiting("u", 6, gpus=3, priority=2)]), Evict) == ["young", "old"]
    assert names(schedule(nodes(), [*walled, waiting("u", 6, gpus=2, priority=2)]), Evict) == ["low"]


def test_nobody_is_evicted_in_vain() -> None:
    running = [
        holding(waiting("low", 1), (0, (0, 1, 2, 3))),
        holding(waiting("same", 2, priority=5), (1, (4,))),
    ]
    assert names(schedule(nodes(), [*running, waiting("u", 3, 2, priority=5)]), Evict) == []


def test_waits_for_those_that_end_already() -> None:
    running = [
        holding(waiting("ending", 1), (0, (0, 1, 2, 3)), stopping=True),
        holding(waiting("low", 2), (1, (4, 5, 6, 7))),
    ]
    assert schedule(nodes(), [*running, waiting("u", 3, priority=5)]) == [
        Wait("u", "waits for ending to end")
    ]


def test_what_starts_in_this_round_is_counted() -> None:
    low = holding(waiting("low", 1), (0, (0, 1, 2, 3)))
    actions = schedule(nodes(), [low, waiting("a", 2, priority=3), waiting("b", 3, 2, priority=2)])
    assert names(actions, Start) == ["a"]
    assert names(actions, Evict) == []


def test_excluded_hosts_are_kept_away_from_while_there_are_others() -> None:
    asked = waiting("a", 1, exclude=frozenset({"node-0", "elsewhere"}))
    assert schedule(nodes(), [asked]) == [Start("a", (Share(1, (4, 5, 6, 7)),))]
    assert names(schedule(nodes(1), [asked]), Start) == ["a"]
    waits = [nodes()[0], replace(nodes()[1], usable=False)]
    assert names(schedule(waits, [asked]), Start) == []


def test_without_gpus_and_cores_one_core_is_charged() -> None:
    small = nodes(1, 0, cpus=2.0)
    jobs = [waiting(name, i, gpus=0) for i, name in enumerate("abc")]
    assert names(schedule(small, jobs), Start) == ["a", "b"]
    assert names(schedule(nodes(1, 0, cpus=0.5), jobs), Start) == ["a"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(3, 1), "3 nodes were asked for, the cluster has 2"),
        (Request(1, 5), "5 GPUs on each node were asked for, the nodes have 4"),
        (Request(1, 1, accelerator="A100"), "accelerator 'A100' was asked for, the cluster has H100"),
        (Request(1, 1, cpus=9), "9 cores on each node were asked for, the nodes have 8"),
        (
            Request(1, 1, memory=64 * GIB),
            "64 GiB of memory on each node were asked for, the nodes have 32 GiB",
        ),
        (Request(2, 4, 8, 32 * GIB, "h100"), ""),
    ],
)
def test_impossible_says_what_was_asked_and_what_there_is(request_: Request, said: str) -> None:
    why = impossible(nodes(), request_)
    assert why.startswith(said)
    assert bool(why) == bool(said)


def test_accelerators_match_by_words() -> None:
    assert accelerator_matches("A100-80GB", "NVIDIA A100-SXM4-80GB")
    assert not accelerator_matches("A100-40GB", "NVIDIA A100-SXM4-80GB")
    assert not accelerator_matches("L4", "NVIDIA L40")
    assert not accelerator_matches("H100", None)


# -- properties --------------------------------------------------------------------------------

SHAPES = st.builds(
    Request,
    nodes=st.integers(1, 4),
    gpus=st.integers(0, 4),
    cpus=st.one_of(st.none(), st.sampled_from([0.5, 1.0, 3.0, 8.0])),
    memory=st.one_of(st.none(), st.sampled_from([GIB, 20 * GIB, 32 * GIB])),
    exclude=st.sampled_from([frozenset[str](), frozenset({"node-0"}), frozenset({"node-1", "node-2"})]),
)
EVENTS = st.one_of(
    st.tuples(st.just("submit"), SHAPES, st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("mark"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 99)),
)


class Machine:
    """A cluster that does what the scheduler says, and holds it to its rules."""

    def __init__(self, count: int) -> None:
        self.nodes = nodes(count)
        self.jobs: dict[str, Job] = {}
        self.clock = 0

    def apply(self, event: tuple[object, ...]) -> None:
        self.clock += 1
        match event:
            case ("submit", Request() as request, int(priority)):
                name = f"job-{self.clock}"
                if not impossible(self.nodes, request):
                    self.jobs[name] = Job(name, self.clock, request, priority)
            case ("end", int(which)):  # some gang ends, be it by itself or after its notice
                running = [job for job in self.jobs.values() if job.held]
                if running:
                    del self.jobs[running[which % len(running)].name]
            case ("leave", int(which)):
                stopping = [job for job in self.jobs.values() if job.stopping]
                if stopping:  # a preempted gang goes back to the queue
                    job = stopping[which % len(stopping)]
                    self.jobs[job.name] = replace(job, held=(), stopping=False)
            case ("mark", int(which), bool(usable)):
                i = which % len(self.nodes)
                self.nodes[i] = replace(self.nodes[i], usable=usable)
        self.round()

    def round(self) -> None:
        before = list(self.jobs.values())
        actions = schedule(self.nodes, before)
        self.check(before, actions)
        for action in actions:
            job = self.jobs[action.name]
            if isinstance(action, Start):
                self.jobs[job.name] = replace(job, held=action.shares, started=float(self.clock))
            elif isinstance(action, Evict):
                self.jobs[job.name] = replace(job, stopping=True)
        self.check_commitments()

    def check(self, before: list[Job], actions: list[Action]) -> None:
        jobs = {job.name: job for job in before}
        line = sorted((j for j in before if not j.held), key=lambda j: (-j.priority, j.order))
        # Everybody in line gets exactly one answer, in the order of the line.
        answers = [action for action in actions if not isinstance(action, Evict)]
        assert [action.name for action in answers] == [job.name for job in line]
        started = set(names(actions, Start))
        for action in actions:
            if isinstance(action, Start):
                job = jobs[action.name]
                assert len({share.node for share in action.shares}) == job.request.nodes
                assert all(len(share.gpus) == job.request.gpus for share in action.shares)
        # The line holds: behind the first that could start on an empty cluster but does not, nobody starts.
        able = [job for job in line if Free(self.nodes, ()).place(job.request) is not None]
        flags = [job.name in started for job in able]
        assert flags == sorted(flags, reverse=True)
        assert started <= {job.name for job in able}
        evicted = [action for action in actions if isinstance(action, Evict)]
        if evicted:
            head = next(job for job in able if job.name not in started)
            gone = {action.name for action in evicted}
            assert {action.winner for action in evicted} == {head.name}
            assert all(jobs[name].held and not jobs[name].stopping for name in gone)
            assert all(jobs[name].priority < head.priority for name in gone)
            placed = {a.name: a.shares for a in actions if isinstance(a, Start)}
            others = [
                replace(job, held=placed.get(job.name, job.held)) for job in before if job.name != head.name
            ]

            def fits(without: set[str]) -> bool:
                left = [j for j in others if j.held and not j.stopping and j.name not in without]
                return Free(self.nodes, left).place(head.request) is not None

            assert fits(gone)
            assert not any(fits(gone - {name}) for name in gone), "somebody was evicted in vain"
            assert not fits(set())

    def check_commitments(self) -> None:
        for node in self.nodes:
            held = [
                (job, share) for job in self.jobs.values() for share in job.held if share.node == node.index
            ]
            gpus = [gpu for _, share in held for gpu in share.gpus]
            assert len(gpus) == len(set(gpus))
            assert set(gpus) <= set(node.gpus)
            assert sum(job.request.cpus or 0 for job, _ in held) <= node.cpus + 1e-6
            assert sum(job.request.memory or 0 for job, _ in held) <= node.memory


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.lists(EVENTS, max_size=25))
def test_the_rules_hold_whatever_happens(count: int, events: list[tuple[object, ...]]) -> None:
    machine = Machine(count)
    for event in events:
        machine.apply(event)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(EVENTS, max_size=20))
def test_the_head_starts_once_what_it_waits_for_has_ended(
    count: int, events: list[tuple[object, ...]]
) -> None:
    machine = Machine(count)
    for event in events:
        machine.apply(event)
    able = [j for j in machine.jobs.values() if not j.held and Free(machine.nodes, ()).place(j.request)]
    head = min(able, key=lambda j: (-j.priority, j.order), default=None)
    for job in [j for j in machine.jobs.values() if j.held]:
        del machine.jobs[job.name]
    machine.round()
    assert head is None or machine.jobs[head.name].held
