"""Builds runtime.pyz, the one file that a job is given.

Purpose: an image needs Python 3.8 and nothing else. The archive is the same
byte for byte wherever it is built from the same sources, so its SHA-256 tells
versions apart. It holds the runtime, and the modules for frameworks, which are
loaded only by programs that ask for them.

Limits: not compressed, since compressors differ between Python builds.

Example::

    from airflow_gpu.runtime.bundle import build
    pathlib.Path("runtime.pyz").write_bytes(build())
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
from typing import Dict

SHEBANG = b"#!/usr/bin/env python3\n"

MOMENT = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive: the earliest that a zip can hold."""

READABLE = 0o644 << 16

MAIN = """\
import signal
import sys

if sys.argv[1:2] == ["agent"]:
    # A notice may come while the rest is still being loaded; the agent takes it when it can.
    notices = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, notices)

from airflow_gpu.runtime.cli import main

sys.exit(main())
"""


@functools.lru_cache(maxsize=1)
def build() -> bytes:
    """The archive. Raises OSError when the package's sources are not there as files."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    members: Dict[str, bytes] = {"__main__.py": MAIN.encode()}
    for folder in ("runtime", "frameworks"):
        for name in os.listdir(os.path.join(package, folder)):
            if name.endswith(".py"):
                with open(os.path.join(package, folder, name), "rb") as file:
                    members[f"airflow_gpu/{folder}/{name}"] = file.read()
    members["airflow_gpu/__init__.py"] = members["airflow_gpu/runtime/_stub.py"]
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, MOMENT)
            info.external_attr = READABLE
            info.create_system = 3  # Unix, also when built elsewhere
            archive.writestr(info, members[name])
    return buffer.getvalue()
