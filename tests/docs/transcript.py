"""Runs a page: files are written, commands are run in one shell, and what they print is compared.

```` ```python title=path ```` writes the file; ```` ```console ```` runs each
line that begins with ``$ `` and compares what it prints with the lines below
it, where ``...`` stands for anything. A block behind ``<!-- test: skip, why
-->`` is left out, and the reason is printed.
"""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(
    r"(?:<!-- test: skip, (?P<skip>[^>]*?) -->\n)?^```(?P<kind>\w+)(?: title=(?P<title>\S+))?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Command:
    line: str
    expected: list[str] = field(default_factory=list)


@dataclass
class Block:
    kind: str
    body: str
    title: str | None
    skip: str | None

    def commands(self) -> list[Command]:
        found: list[Command] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif found:
                found[-1].expected.append(line)
        return found


def blocks(page: Path) -> Iterator[Block]:
    for match in BLOCK.finditer(page.read_text()):
        yield Block(match["kind"], match["body"], match["title"], match["skip"])


class Shell:
    """One bash for a whole page, so that exports and background jobs last."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=env,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, line: str) -> tuple[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        mark = uuid.uuid4().hex
        self.process.stdin.write(f"{line}\necho {mark} $?\n")
        self.process.stdin.flush()
        lines: list[str] = []
        for text in self.process.stdout:
            if text.startswith(mark):
                return "".join(lines), int(text.split()[1])
            if mark in text:  # output without a newline at its end
                before, _, after = text.partition(mark)
                return "".join([*lines, before]), int(after.split()[0])
            lines.append(text)
        raise AssertionError(f"the shell ended in: {line}\n{''.join(lines)}")

    def close(self) -> None:
        import os
        import signal

        try:
            os.killpg(self.process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        self.process.wait(10)


def matches(expected: list[str], output: str) -> bool:
    """Every expected piece is there, in this order."""
    position = 0
    for line in expected:
        for piece in filter(None, (part.strip() for part in line.split("..."))):
            found = output.find(piece, position)
            if found < 0:
                return False
            position = found + len(piece)
    return True


def play(page: Path, folder: Path, env: dict[str, str]) -> int:
    """Run the page in a folder; the number of commands that were run.

    :raises AssertionError: a command failed or printed something else.
    """
    shell = Shell(folder, env)
    count = 0
    try:
        for block in blocks(page):
            if block.skip is not None:
                print(f"{page.name}: left out: {block.skip}")
            elif block.title is not None:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body)
            elif block.kind == "console":
                for command in block.commands():
                    output, code = shell.run(command.line)
                    count += 1
                    assert code == 0, f"$ {command.line}\nended with {code}:\n{output}"
                    assert matches(command.expected, output), (
                        f"$ {command.line}\nprinted:\n{output}\ninstead of:\n" + "\n".join(command.expected)
                    )
    finally:
        shell.close()
    return count
