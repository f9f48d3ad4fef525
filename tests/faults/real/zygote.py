"""Forks bare drivers from a process that has everything imported and has used nothing.

Purpose: starting one takes milliseconds instead of half a second, so thousands
can be killed. Reads commands as JSON lines on standard input, and answers with
lines on standard output.

Limits: it must not touch a ``Store`` itself: those do not survive a fork.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
from typing import Any

from tests.faults.real.bare import Errand, main

LOOK = 0.02


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def child(errand: dict[str, Any]) -> None:
    """In the new process: carry the errand out and leave at once."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        main(Errand(**errand))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Until standard input ends; then what still lives is killed."""
    logging.disable(logging.CRITICAL)  # spoilt calls are what the drivers would speak of
    living: dict[int, str] = {}
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], LOOK)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, text = (text + data).split(b"\n")
        for command in map(json.loads, lines if ready else []):
            if "errand" in command:
                pid = os.fork()
                if pid == 0:
                    child(command["errand"])
                living[pid] = command["id"]
            else:
                for pid, name in living.items():
                    if name == command["id"]:
                        os.kill(pid, command["signal"])
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if not done:
                continue
            if os.WIFSTOPPED(status):
                answer(id=living[pid], what="stopped")
                continue
            killed = os.WIFSIGNALED(status)
            answer(
                id=living.pop(pid),
                what="killed" if killed else "ended",
                code=os.waitstatus_to_exitcode(status),
            )
    for pid in living:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
