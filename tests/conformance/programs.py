"""What the gangs of the suite run: plain functions, sent as source."""

from __future__ import annotations

PAUSE = 0.05
"""Seconds of one step of ``count``."""


def count(total, pause=0.05, shout="", gang=None):
    """Counts steps, saves when it is due, and hands back where it began."""
    import json
    import os
    import time

    begun = {"done": 0}

    def load(directory):
        begun["done"] = json.loads((directory / f"rank-{gang.rank}.json").read_text())["done"]

    start = gang.checkpoint.restore(load)
    assert begun["done"] == start, (begun, start)
    if shout:
        print(shout + os.environ.get("TOKEN", ""), flush=True)
    for step in range(start, total):
        time.sleep(pause)
        gang.progress(step + 1, total)
        if gang.checkpoint.due(step + 1):
            with gang.checkpoint.save(step + 1) as directory:
                (directory / f"rank-{gang.rank}.json").write_text(json.dumps({"done": step + 1}))
    return {"start": start, "total": total, "world_size": gang.world_size, "rank": gang.rank}


def fail(bad_rank, code, gang=None):
    """One rank ends badly after a word on stderr; the others would wait for ever."""
    import os
    import sys
    import time

    if gang.rank == bad_rank:
        time.sleep(0.3)
        print("the loss is not a number", file=sys.stderr, flush=True)
        if code < 0:
            os.kill(os.getpid(), -code)
        raise SystemExit(code)
    time.sleep(600)


def sleep(seconds, gang=None):
    """Does nothing, and does not know of notices."""
    import time

    time.sleep(seconds)


def blurt(gang=None):
    """Fails with a secret in its last words."""
    import os

    raise RuntimeError("cannot log in with " + os.environ["TOKEN"])
