"""Linux's ways to make sure that processes do not outlive whoever started them.

Purpose: a rank whose agent is gone must not go on computing. Three ways are
combined, since each has a hole:

- ranks ask the kernel to kill them when their parent dies (not inherited by
  *their* children, e.g. the Python below a bash script);
- agent and guard adopt orphans below them, so that whoever is left can find
  and kill everything that was started, sessions and daemons included;
- ranks that use the handle leave when the control channel is lost.

Limits: does nothing on systems without ``prctl`` or ``/proc``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Dict, List, Sequence

PR_SET_CHILD_SUBREAPER = 36

KILL_ROUNDS_SECONDS = 10.0
"""How long processes are killed that keep forking, or do not die."""

KILL_PAUSE = 0.02
"""Between two looks for what is left."""

SHIM = """\
import os, signal, sys
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except Exception:
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
try:
    os.setpgid(0, 0)
except OSError:
    pass
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write("gang: cannot start %s: %s\\n" % (sys.argv[2], error.strerror))
    os._exit(126 if isinstance(error, PermissionError) else 127)
"""
"""Run by the agent's own Python, and then replaced by the rank's command.

It asks for SIGKILL at the parent's death (1 is PR_SET_PDEATHSIG), leaves if the
parent died before that, and leads a process group of its own. Python ignores
SIGPIPE, and what is ignored stays so across exec, hence the first lines. A helper instead of
``preexec_fn``, which is not safe in a process with threads."""


def adopt_orphans() -> None:
    """From now on orphans below this process become its children."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def descendants(pid: int, but: Sequence[int] = ()) -> List[int]:
    """All living processes below ``pid``, without those in ``but`` and what is below them."""
    children: Dict[int, List[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue
        # The command's name, in parentheses, may hold spaces and parentheses itself.
        state, parent = text[text.rindex(b")") + 2 :].split()[:2]
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(name))
    found: List[int] = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in but:
                found.append(child)
                waiting.append(child)
    return found


def kill_descendants(pid: int) -> List[int]:
    """SIGKILL everything below ``pid`` until nothing is left; answers what did not die in time."""
    until = time.monotonic() + KILL_ROUNDS_SECONDS
    while True:
        left = descendants(pid)
        for one in left:
            try:
                os.kill(one, signal.SIGKILL)
            except OSError:
                pass
        if not left or time.monotonic() >= until:
            return left
        time.sleep(KILL_PAUSE)
