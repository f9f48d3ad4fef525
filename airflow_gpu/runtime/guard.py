"""A small process above the agent, which sees to it that nothing outlives the agent.

Purpose: if the agent is killed with -9, ranks and whatever they started must
not go on computing. The guard is the process that the platform started; the
agent is its child. When the agent ends, however it ends, the guard kills
everything that is left below it and ends with the same code. When the guard is
killed, the agent notices (a pipe closes) and ends its ranks.

It also is a good first process of a container: it passes signals on, and waits
for orphans.

Limits: if both are killed in the same moment, ranks still die with their parent
(:mod:`airflow_gpu.runtime.prctl`), but children of ranks may be left to the
platform.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Callable

from airflow_gpu.runtime.prctl import adopt_orphans, kill_descendants
from airflow_gpu.runtime.words import NOTICE_SIGNALS


def guarded(agent: Callable[[int], int]) -> int:
    """Run ``agent`` in a child process; answers its exit code, 128 + n for a signal.

    ``agent`` gets a descriptor that reads end-of-file once the guard is gone.
    Must be called before any thread is started.
    """
    ours, theirs = os.pipe()
    numbers = [getattr(signal, name) for name in NOTICE_SIGNALS]
    # Held back until there is somebody to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        adopt_orphans()
        code = 1
        try:
            code = agent(ours)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        except BaseException:  # the child must not run what its parent has on the stack
            sys.excepthook(*sys.exc_info())
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except (OSError, ValueError):
                pass
            os._exit(code)
    os.close(ours)

    def pass_on(number: int, frame: object) -> None:
        try:
            os.kill(pid, number)
        except OSError:
            pass

    for number in numbers:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    status = _wait_for(pid)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    kill_descendants(os.getpid())
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.waitpid(-1, 0)  # orphans too
        if ended == pid:
            return status
