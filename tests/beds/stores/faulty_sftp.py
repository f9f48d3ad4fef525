"""An SFTP server that loses, refuses and repeats on demand: stands between sshd and the real sftp-server.

    python faulty_sftp.py FOLDER SFTP_SERVER [OPTIONS...]

`FOLDER/faults` is a JSON list of `[action, request]`, used up in order; `request` is a number of the protocol (3 open,
5 read, 6 write, ...) or the name of an extension. Actions:

- `cut`: end without letting the request through.
- `lose`: let it take effect, then end without its answer.
- `twice`: let it take effect twice, and pass on the second answer only, as an NFS client does whose answer was lost.
- `freeze`: never answer anything again.

Each line of `FOLDER/hidden` is the name of an extension that the server seems not to have. `FOLDER/seen` counts the
sessions. Standard library only: it is started by whatever Python the test runs in, once a connection.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

EXTENDED, VERSION = 200, 2


def main() -> None:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    with (folder / "seen").open("a") as seen:
        seen.write("x")
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    answers = Answers(server, folder)
    threading.Thread(target=answers.run, daemon=True).start()
    while (packet := read(sys.stdin.buffer)) is not None:
        action = due(folder, kind(packet))
        if action == "cut":
            end(server)
        if action == "freeze":
            while folder.exists():  # as long as the test
                time.sleep(0.2)
            end(server)
        if action == "lose":
            answers.last = number(packet)
        if action == "twice":
            answers.swallowed = number(packet)
            send(server.stdin, packet)
        send(server.stdin, packet)
    server.stdin.close()
    server.wait()


class Answers:
    """What the server says, passed on in a thread."""

    def __init__(self, server: subprocess.Popen[bytes], folder: Path) -> None:
        self.server, self.folder = server, folder
        self.last: int | None = None
        self.swallowed: int | None = None

    def run(self) -> None:
        assert self.server.stdout is not None
        while (packet := read(self.server.stdout)) is not None:
            if packet[0] == VERSION:
                packet = without(packet, hidden(self.folder))
            elif number(packet) == self.last:
                end(self.server)
            elif number(packet) == self.swallowed:
                self.swallowed = None
                continue
            send(sys.stdout.buffer, packet)
        end(self.server)


def read(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    return stream.read(struct.unpack(">I", head)[0]) if len(head) == 4 else None


def send(stream: BinaryIO, packet: bytes) -> None:
    stream.write(struct.pack(">I", len(packet)) + packet)
    stream.flush()


def number(packet: bytes) -> int:
    return int(struct.unpack(">I", packet[1:5])[0])


def kind(packet: bytes) -> int | str:
    if packet[0] != EXTENDED:
        return packet[0]
    (length,) = struct.unpack(">I", packet[5:9])
    return packet[9 : 9 + length].decode()


def due(folder: Path, of: int | str) -> str | None:
    try:
        faults = json.loads((folder / "faults").read_text())
    except FileNotFoundError:
        return None
    if not faults or faults[0][1] != of:
        return None
    (folder / "faults.new").write_text(json.dumps(faults[1:]))
    os.replace(folder / "faults.new", folder / "faults")
    return str(faults[0][0])


def hidden(folder: Path) -> list[bytes]:
    try:
        return (folder / "hidden").read_bytes().split()
    except FileNotFoundError:
        return []


def without(packet: bytes, names: list[bytes]) -> bytes:
    """A VERSION packet without some of its pairs of strings."""
    kept, at = packet[:5], 5
    while at < len(packet):
        begin, pair = at, []
        for _ in range(2):
            (length,) = struct.unpack(">I", packet[at : at + 4])
            pair.append(packet[at + 4 : at + 4 + length])
            at += 4 + length
        if pair[0] not in names:
            kept += packet[begin:at]
    return kept


def end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    os._exit(1)


main()
