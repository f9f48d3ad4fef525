"""``due(step)`` is the same on every rank, whatever their relative speed, and nothing published is ever changed."""

from __future__ import annotations

import random
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu.runtime.due import AHEAD_SECONDS, Decider, Follower, News


class World:
    """Rank 0 and followers on a clock of their own, with messages that take their time."""

    def __init__(
        self, asked: list[int], interval: float | None, ranks: int, seed: int, notice_at: float | None
    ) -> None:
        self.asked = asked
        self.random = random.Random(seed)
        self.decider = Decider(interval, 0.0)
        self.notice_at = notice_at
        self.followers = [Follower() for _ in range(ranks - 1)]
        self.position = [0] * ranks
        self.answers: list[list[bool]] = [[] for _ in range(ranks)]
        self.mail: list[list[tuple[float, News]]] = [[] for _ in range(ranks - 1)]
        self.published: list[News] = []
        self.now = 0.0

    def run(self) -> None:
        while any(position < len(self.asked) for position in self.position):
            self.now += self.random.choice([0.001, 0.01, 0.1, 1.0])
            for box, follower in zip(self.mail, self.followers, strict=True):
                while box and box[0][0] <= self.now:
                    news = box.pop(0)[1]
                    follower.learn(news.horizon, news.saves)
            rank = self.random.randrange(len(self.position))
            if self.position[rank] < len(self.asked):
                self.step(rank)

    def step(self, rank: int) -> None:
        step = self.asked[self.position[rank]]
        if rank == 0:
            noticed = self.notice_at is not None and self.now >= self.notice_at
            answer, news = self.decider.ask(step, self.now, noticed)
            if news is not None:
                self.published.append(news)
                for box in self.mail:
                    arrival = self.now + self.random.choice([0.0, 0.05, 2.0])
                    box.append((max(arrival, box[-1][0] if box else 0.0), news))
            if answer:
                self.decider.saved(self.now, 0.0)
        else:
            follower = self.followers[rank - 1]
            if not follower.knows(step):
                return  # waits
            answer = follower.ask(step)
        self.answers[rank].append(answer)
        self.position[rank] += 1


def worlds(draw_steps: st.SearchStrategy[list[int]]) -> st.SearchStrategy[World]:
    return st.builds(
        World,
        draw_steps,
        st.sampled_from([None, 0.0, 0.05, 1.0, 30.0]),
        st.integers(2, 5),
        st.integers(0, 2**32),
        st.sampled_from([None, 0.0, 0.3, 5.0]),
    )


DENSE = st.integers(0, 1000).flatmap(
    lambda start: st.integers(1, 80).map(lambda n: list(range(start, start + n)))
)
SPARSE = st.lists(st.integers(0, 5000), min_size=1, max_size=60, unique=True).map(sorted)


@settings(max_examples=150, deadline=None)
@given(worlds(st.one_of(DENSE, SPARSE)))
def test_same_answer_on_every_rank(world: World) -> None:
    world.run()
    for answers in world.answers[1:]:
        assert answers == world.answers[0]
    horizon = None
    for news in world.published:
        assert horizon is None or news.horizon > horizon
        assert all((horizon is None or save > horizon) and save <= news.horizon for save in news.saves)
        horizon = news.horizon
    announced = [save for news in world.published for save in news.saves]
    # Each announced save is answered with yes exactly once, at the first step asked for from there on.
    expected = [
        any(save <= step and (n == 0 or world.asked[n - 1] < save) for save in announced)
        for n, step in enumerate(world.asked)
    ]
    assert world.answers[0] == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.floats(0.0001, 20.0))
def test_a_notice_is_acted_on_soon(start: int, seconds: float) -> None:
    decider, now, waited, noticed_at = Decider(None, 0.0), 0.0, 0, None
    for n in range(1, 3000):
        now += seconds
        due, _ = decider.ask(start + n, now, noticed=n > 50)
        if n > 50:
            noticed_at = noticed_at or now
            waited += 1
        if due:
            break
    assert due
    assert noticed_at is not None
    assert now - noticed_at <= AHEAD_SECONDS + seconds + 1e-6
    assert waited <= 1001


def test_messages_are_few() -> None:
    decider, now, messages = Decider(None, 0.0), 0.0, 0
    for step in range(1, 100_001):
        now += 0.001
        messages += decider.ask(step, now, False)[1] is not None
    assert messages <= 100 * 2 + 20  # 100 seconds, about two a second


def test_interval_of_zero_saves_at_every_step_asked_for() -> None:
    decider = Decider(0.0, 0.0)
    assert all(decider.ask(step, step / 100, False)[0] for step in range(7, 60))


def test_asking_again_gives_the_same_answer() -> None:
    decider, follower = Decider(0.0, 0.0), Follower()
    due, news = decider.ask(5, 1.0, False)
    assert news is not None
    follower.learn(news.horizon, news.saves)
    follower.learn(news.horizon, news.saves)
    assert (due, follower.ask(5)) == (True, True)
    assert decider.ask(5, 9.0, False) == (True, None)
    assert decider.ask(4, 9.0, False) == (False, None)
    assert (follower.ask(5), follower.ask(4)) == (True, False)


def test_real_threads_at_random_speeds() -> None:
    decider, ranks, total = Decider(0.02, time.monotonic()), 5, 400
    followers = [Follower() for _ in range(ranks - 1)]
    conditions = [threading.Condition() for _ in followers]
    answers: list[list[bool]] = [[] for _ in range(ranks)]
    noticed = threading.Event()

    def leader() -> None:
        for step in range(total):
            due, news = decider.ask(step, time.monotonic(), noticed.is_set())
            if news is not None:
                for follower, condition in zip(followers, conditions, strict=True):
                    with condition:
                        follower.learn(news.horizon, news.saves)
                        condition.notify()
            if due:
                decider.saved(time.monotonic(), 0.0)
            answers[0].append(due)
            time.sleep(random.random() / 2000)

    def follow(rank: int) -> None:
        follower, condition = followers[rank - 1], conditions[rank - 1]
        for step in range(total):
            with condition:
                while not follower.knows(step):
                    condition.wait()
                answers[rank].append(follower.ask(step))
            time.sleep(random.random() / 1000 if rank % 2 else 0)

    threads = [threading.Thread(target=leader)] + [
        threading.Thread(target=follow, args=(r,)) for r in range(1, ranks)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    noticed.set()
    for thread in threads:
        thread.join(60)
    assert all(a == answers[0] for a in answers)
    assert len(answers[0]) == total
    assert any(answers[0])
