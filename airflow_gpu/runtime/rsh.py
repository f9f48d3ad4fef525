"""What mpirun takes for ssh: ``rsh HOST COMMAND...`` runs a command line on another node of the gang.

Purpose: see :mod:`airflow_gpu.runtime.relay`. Output goes to this process's
standard output and error, the exit code is the command's. 255, as with ssh,
when the node or the gang cannot be reached.

Limits: options in front of the host (``-x``, ``-l user``, ``-p port`` ...) are
passed over. Standard input is not carried.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from typing import List, Optional

from airflow_gpu.runtime.wire import NO_SUCH_NODE, REMOTE, Link, Message, Refused, Unreachable
from airflow_gpu.runtime.words import VERSION

CONNECT_SECONDS = 30.0
"""For reaching node 0's agent, which is on this machine."""

WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
"""Options of ssh that take a value."""


def main(arguments: List[str]) -> int:
    """Answers the command's exit code."""
    words = list(arguments)
    while words and words[0].startswith("-") and len(words[0]) > 1:
        option = words.pop(0)
        if len(option) == 2 and option[1] in WITH_VALUE and words:
            words.pop(0)
    if len(words) < 2:
        sys.stderr.write("usage: rsh HOST COMMAND...\n")
        return NO_SUCH_NODE
    host = words.pop(0).rpartition("@")[2]
    control, token = os.environ.get("GANG_CONTROL"), os.environ.get("GANG_TOKEN")
    if not control or not token:
        sys.stderr.write("gang: GANG_CONTROL is not set: this runs inside of a gang only\n")
        return NO_SUCH_NODE
    inbox: queue.SimpleQueue[Optional[Message]] = queue.SimpleQueue()
    link = Link(inbox.put, lambda reason: inbox.put(None))
    hello = {"hello": REMOTE, "v": VERSION, "index": -1, "token": token}
    try:
        link.open(control, hello, time.monotonic() + CONNECT_SECONDS)
    except (Refused, Unreachable) as error:
        sys.stderr.write(f"gang: {error}\n")
        return NO_SUCH_NODE
    link.start()
    # Joined by spaces and left to the other shell, as ssh does.
    link.send({"t": "exec", "host": host, "line": " ".join(words)})
    while True:
        message = inbox.get()
        if message is None:
            sys.stderr.write("gang: the gang is over\n")
            return NO_SUCH_NODE
        if message.get("t") == "output":
            stream = sys.stderr if message.get("stream") == "err" else sys.stdout
            stream.write(str(message.get("text", "")))
            stream.flush()
        elif message.get("t") == "exit":
            link.close()
            return int(message.get("code", NO_SUCH_NODE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
