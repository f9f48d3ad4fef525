"""The daemon of a cluster folder: exactly one, started when it is needed, gone when it is not.

Purpose: hold the lock, beat the heart, and let :class:`~.cluster.Cluster` work
round after round. It outlives whoever started it.

What it does not do: own the gangs. They are no worse off when it is killed;
the next one finds them.

Limits: one folder, one machine. The lock is a record lock on a local file system.

Run as ``main(["/path/of/the/folder"])`` by :mod:`.client`; for people there is
``python -m airflow_gpu.targets.local``.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu.targets.local import supervise
from airflow_gpu.targets.local.cluster import Cluster
from airflow_gpu.targets.local.files import PRIVATE_FILE, Folder, encode, replace_file
from airflow_gpu.targets.local.processes import boot_id, read_process

if TYPE_CHECKING:
    from types import FrameType

ACTIVE_PERIOD = 0.15
"""Seconds between rounds while a gang holds nodes."""

ENDING_PERIOD = 0.03
"""Seconds between rounds while a gang is about to be found gone."""

IDLE_PERIOD = 1.0
"""Seconds between rounds otherwise. Who wants something sooner writes to the FIFO."""

TROUBLE_PAUSE = 1.0
"""Seconds to wait after a round that failed as a whole, e.g. on a full disk."""

DEFAULT_IDLE_EXIT = 300.0

log = logging.getLogger("airflow_gpu.local")


def main(arguments: list[str] | None = None) -> None:
    """Become a daemon for the folder, and serve until idle or told to end. Leaves at once if one lives."""
    folder = Folder(Path((arguments or sys.argv[1:])[0]))
    # Whoever starts us has given us a session; not being its leader, we can never get a terminal.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o022)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    lock = take_lock(folder)
    if lock is None:
        return
    try:
        serve(folder)
    except Exception as error:
        log.exception("the daemon failed")
        with contextlib.suppress(OSError):
            replace_file(folder.problem, f"{error}\n".encode())
        sys.exit(1)
    finally:
        with contextlib.suppress(OSError):
            folder.daemon.unlink(missing_ok=True)


def take_lock(folder: Folder) -> int | None:
    """The daemon's lock, held until the process ends; None when another daemon has it.

    A record lock, not flock: a child that is between fork and exec when its daemon is killed would
    hold a flock on.
    """
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either is allowed to mean that it is taken
        os.close(descriptor)
        return None
    return descriptor


def serve(folder: Folder) -> None:
    """Work until idle for long enough or told to end."""
    folder.daemon.unlink(missing_ok=True)  # of a daemon that was killed
    folder.problem.unlink(missing_ok=True)
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)

    def look(number: int, frame: FrameType | None) -> None:
        """A shell has ended or stopped; the wake-up below is all that is needed."""

    wake = open_wake(folder)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # Handlers, not "ignore": what is ignored here, or was by who started us, would be in every rank.
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, look)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    cluster = Cluster(folder)
    cluster.load()
    me = read_process(os.getpid())
    about = {
        "v": 1,
        "pid": os.getpid(),
        "start": me.ident.start if me else 0,
        "boot": boot_id(),
        "at": time.time(),
    }
    replace_file(folder.daemon, encode(about))
    log.info("serving %s", folder.root)
    busy_at = time.monotonic()
    while not ended and not cluster.closing:
        pause = IDLE_PERIOD
        try:
            cluster.tick()
            os.utime(folder.daemon)
            if cluster.holding():
                pause = (
                    ENDING_PERIOD if any(map(supervise.about_to_end, cluster.holding())) else ACTIVE_PERIOD
                )
        except Exception:
            log.exception("this round failed, going on")
            pause = TROUBLE_PAUSE
        now = time.monotonic()
        if cluster.unfinished():
            busy_at = now
        elif now - busy_at >= float(cluster.shape.get("idle_exit") or DEFAULT_IDLE_EXIT):
            log.info("nothing to do for a while")
            break
        if not cluster.closing:
            rest(wake, pause)
    log.info("ended; %d gangs go on", len(cluster.holding()))


def open_wake(folder: Folder) -> int:
    """The FIFO by which others end our sleep. Open for both: so it never looks closed."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(folder.wake, PRIVATE_FILE)
    return os.open(folder.wake, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def rest(wake: int, pause: float) -> None:
    """Sleep, until someone writes to the FIFO; signals do too."""
    ready, _, _ = select.select([wake], [], [], pause)
    if ready:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 65536)
