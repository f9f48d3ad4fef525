"""A stand-in for the runtime: an agent that runs one rank and writes what the contract says, on an object store.

``python agent.py <payload>/runtime.pyz agent <payload>/job.json``. It knows nothing but its payload, its environment
and the file of secrets, like the runtime; it is here so that Airflow's side is tested by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from airflow_gpu.gang.entries import iso
from airflow_gpu.rundir.store import Store


async def main(job_file: Path) -> None:
    job = json.loads(job_file.read_text())
    secrets = json.loads(Path(os.environ["GANG_SECRETS_FILE"]).read_text())
    os.environ.update({name: value for name, value in secrets.items() if name.startswith("AWS_")})
    store, life = Store(job["channel"], job["store"]), job["first_life"]
    about = {"v": 1, "life": life, "attempt": job["attempt"], "at": iso(time.time())}
    claim = {
        "kind": "life",
        "job": os.environ["GANG_JOB_ID"],
        "restart": 0,
        "nodes": 1,
        "processes": 1,
        "from": None,
    }
    await store.create(f"lives/{life:04d}.json", json.dumps({**about, **claim}).encode())
    offset = 0
    for line in (b"hello from ", b"an object store\n", b"and goodbye\n"):
        await store.create(f"lives/{life:04d}/logs/rank-00000/{offset:015d}", line)
        offset += len(line)
    rank = {"rank": 0, "local_rank": 0, "exit_code": 0, "signal": None}
    record = {**about, "node": 0, "host": "here", "ranks": [rank]}
    await store.create(f"lives/{life:04d}/nodes/0000.json", json.dumps(record).encode())


if __name__ == "__main__":
    assert Path(sys.argv[1]).read_bytes()[:2] in (b"PK", b"#!"), "the runtime is beside it"
    asyncio.run(main(Path(sys.argv[3])))
