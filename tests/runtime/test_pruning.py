"""A life is claimed from a checkpoint while another life lets go of it: in every order of their steps one of them yields."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.runtime.checkpoint import Ancestor, Start, complete
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.pruning import Superseded, _Pruner, pin, unpin

CHECKPOINT = "checkpoints/0001/step-000000005"
CLAIM_STEPS, PRUNE_STEPS = 5, 7
"""Operations on the channel; where one ends early, what is left of a schedule is not used."""


class Stepwise(Folder):
    """A folder whose every operation waits for its turn."""

    def __init__(self, root: str, turns: threading.Semaphore, done: threading.Semaphore) -> None:
        super().__init__(root)
        self.turns, self.done = turns, done


def _stepwise(name: str) -> Callable[..., Any]:
    def step(self: Stepwise, *args: Any, **more: Any) -> Any:
        self.turns.acquire()
        try:
            return getattr(Folder, name)(self, *args, **more)
        finally:
            self.done.release()

    return step


for operation in ("create", "replace", "names", "exists", "remove", "remove_tree"):
    setattr(Stepwise, operation, _stepwise(operation))


def prepared(folder: Path) -> Folder:
    channel = Folder(str(folder))
    channel.create("lives/0001.json", b"{}")
    channel.create(f"{CHECKPOINT}/manifest.json", json.dumps({"step": 5}).encode())
    channel.create(f"{CHECKPOINT}/rank-0", b"weights")
    return channel


def play(folder: Path, order: tuple[int, ...], pruner: int) -> tuple[bool, bool]:
    """In this order of steps (0: the claim, 1: the pruning of life ``pruner``); was it claimed, is it there?"""
    channel = prepared(folder)
    start = Start(1, 5, "step-000000005", verified=True)
    done = threading.Semaphore(0)
    turns = [threading.Semaphore(0), threading.Semaphore(0)]
    claimed: list[bool] = []

    def claim() -> None:
        mine = Stepwise(str(folder), turns[0], done)
        if pin(mine, 2, start, [Ancestor(1)]):
            mine.create("lives/0002.json", b"{}")
            unpin(mine, 2, start)
            claimed.append(True)

    def prune() -> None:
        try:
            _Pruner(Stepwise(str(folder), turns[1], done), pruner, lambda _: None).remove(1, "step-000000005")
        except Superseded:
            pass

    threads = [threading.Thread(target=claim), threading.Thread(target=prune)]
    for thread in threads:
        thread.start()
    for who in order:
        if threads[who].is_alive():
            turns[who].release()
            while not done.acquire(timeout=0.02) and threads[who].is_alive():
                pass
    for who in (0, 1):  # what is left
        for _ in range(50):
            turns[who].release()
    for thread in threads:
        thread.join()
    whole = channel.exists(f"{CHECKPOINT}/manifest.json") and channel.exists(f"{CHECKPOINT}/rank-0")
    return bool(claimed), whole


ORDERS = [
    tuple(0 if at in claims else 1 for at in range(CLAIM_STEPS + PRUNE_STEPS))
    for claims in itertools.combinations(range(CLAIM_STEPS + PRUNE_STEPS), CLAIM_STEPS)
]


def test_every_order(tmp_path: Path) -> None:
    seen = set()
    for number, order in enumerate(ORDERS):
        claimed, whole = play(tmp_path / str(number), order, pruner=1)
        assert whole or not claimed, f"claimed from what was removed: {order}"
        seen.add((claimed, whole))
    assert {(True, True), (False, False)} <= seen, "both get their way in some order"


@pytest.mark.parametrize(("pin_of", "goes"), [(1, True), (2, False)])
def test_what_a_claim_left_behind_holds_nothing_for_ever(tmp_path: Path, pin_of: int, goes: bool) -> None:
    channel = prepared(tmp_path)
    channel.create(f"checkpoints/0001/.step-000000005.pin-{pin_of:04d}", b"")
    _Pruner(channel, 1, lambda _: None).remove(1, "step-000000005")
    assert channel.exists(f"{CHECKPOINT}/manifest.json") is not goes
    assert not [name for name in channel.names("checkpoints/0001") if ".doomed" in name]
    if goes:
        assert channel.names("checkpoints/0001") == []


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    channel = prepared(tmp_path)
    channel.create("checkpoints/0001/.step-000000005.doomed-0001", b"")
    assert not pin(channel, 2, Start(1, 5, "step-000000005", verified=True), [Ancestor(1)])
    _Pruner(channel, 1, lambda _: None).remove_partial(1, None)
    assert channel.names("checkpoints/0001") == []


def test_a_mark_of_one_that_was_overtaken_holds_nobody_up(tmp_path: Path) -> None:
    """Life 2 was claimed from it, so whoever had marked it before has to yield; the mark may have been left behind."""
    channel = prepared(tmp_path)
    channel.create("checkpoints/0001/.step-000000005.doomed-0001", b"")
    (tmp_path / CHECKPOINT / "manifest.json").write_text(
        '{"v": 1, "life": 1, "step": 5, "world_size": 1, "files": []}'
    )
    assert complete(channel, 1, print, [Ancestor(1)]) == []
    assert [found.step for found in complete(channel, 1, print, [Ancestor(1), Ancestor(2, 1, 5)])] == [5]
    assert complete(channel, 1, print, [Ancestor(1), Ancestor(2, 1, 4)]) == []
    channel.create("checkpoints/0001/.step-000000005.doomed-0002", b"")
    assert complete(channel, 1, print, [Ancestor(1), Ancestor(2, 1, 5)]) == [], "life 2 itself may remove it"
