"""What the agent is given: the payload (the same on every node), and who this node is (its environment).

Purpose: :class:`Job` is ``job.json`` checked, :class:`Node` the identity that a
target gives by environment. Both tables are in ``docs/run-directory.md``.

Limits: fields that this version does not know are ignored.

Example::

    job = Job.load("/shared/.../payload/0001/job.json")
    node = Node.of(job, os.environ)
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

LAUNCHES = ("rank", "node", "head")

SHORTEST_SECRET = 4
"""Characters. A shorter value would be found in every other word."""

UNCOUNTED = "auto"
"""GANG_RESTART of a platform that starts a gang again but does not count: the claim counts then."""

PYTHON_WORD = "<python>"
"""As the first word of the command: the interpreter that runs this agent."""

PAYLOAD_WORD = "<payload>"
"""At the start of an argument of the command: replaced by the payload's folder, as this node sees it."""


class Unusable(Exception):
    """The payload or the environment is not what the agent needs. The message says what to change."""


@dataclass(frozen=True)
class Seed:
    """A checkpoint of another place: of this run where it ran before, or of an earlier run.

    ``channel`` is the channel half there, a path as this node sees it or a
    URI; the chain begins with ``step`` of ``life``.
    """

    channel: str
    life: int
    step: int
    run: str = ""
    store: Mapping[str, Any] = field(default_factory=dict)  # as of the job


@dataclass(frozen=True)
class Job:
    """``payload/<attempt>/job.json``. Seconds for all times; ``interval`` None: save only on a notice."""

    run: str
    attempt: int
    first_life: int
    resume: bool
    channel: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    launch: str
    command: Tuple[str, ...]
    env: Mapping[str, str]
    secrets_file: Optional[str]
    time_limit: Optional[float]  # seconds of this life; the platform enforces it
    barrier_timeout: float
    stop_grace: float
    interval: Optional[float]
    keep: int
    payload: str
    mtbf: Optional[float] = None  # expected seconds between interruptions; given, the interval adapts
    since: int = 0  # lives with a lower number are no ancestors
    every: Optional[int] = None  # beside the newest ``keep``, checkpoints of these steps' multiples are kept
    seed: Optional[Seed] = None  # where to begin while this channel has no checkpoint for it
    store: Mapping[str, Any] = field(default_factory=dict)  # options of an object store; none is secret
    local: str = ""  # folder of each node for quick copies of checkpoints; empty: all saves go to the channel
    local_interval: float = 120.0  # seconds between saves of either kind

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def processes_on(self, node: int) -> int:
        """How many processes the agent itself starts on a node."""
        if self.launch == "rank":
            return self.ranks_per_node
        return 1 if self.launch == "node" or node == 0 else 0

    @property
    def processes(self) -> int:
        """How many processes have to end well for the life to have succeeded."""
        return sum(self.processes_on(node) for node in range(self.nodes))

    @classmethod
    def load(cls, path: str) -> Job:
        """Read and check. Raises Unusable."""
        try:
            with open(path, encoding="utf-8") as file:
                body = json.load(file)
        except (OSError, ValueError) as error:
            raise Unusable(f"cannot read the payload {path}: {error}") from None
        if not isinstance(body, dict):
            raise Unusable(f"{path} is no JSON object")
        return cls.of(body, os.path.dirname(os.path.abspath(path)))

    @classmethod
    def of(cls, body: Dict[str, Any], payload: str) -> Job:
        """From the parsed payload that lies in the folder ``payload``. Raises Unusable."""
        if body.get("v") != 1:
            raise Unusable(f"the payload has version {body.get('v')!r}; this runtime reads version 1")
        try:
            checkpoint = body.get("checkpoint") or {}
            interval = checkpoint.get("interval")
            seed = body.get("seed")
            job = cls(
                run=str(body.get("run", "")),
                attempt=int(body["attempt"]),
                first_life=int(body.get("first_life", 1)),
                resume=bool(body.get("resume", True)),
                channel=str(body["channel"]),
                nodes=int(body["nodes"]),
                ranks_per_node=int(body["ranks_per_node"]),
                gpus_per_node=int(body.get("gpus_per_node", 0)),
                launch=str(body.get("launch", "rank")),
                command=tuple(_located(str(word), payload) for word in body["command"]),
                env={str(name): str(value) for name, value in (body.get("env") or {}).items()},
                time_limit=None if body.get("time_limit") is None else float(body["time_limit"]),
                secrets_file=body.get("secrets_file") or os.environ.get("GANG_SECRETS_FILE") or None,
                barrier_timeout=float(body.get("barrier_timeout", 600)),
                stop_grace=float(body.get("stop_grace", 30)),
                interval=None if interval is None else float(interval),
                keep=max(1, int(checkpoint.get("keep", 3))),
                payload=payload,
                every=None if checkpoint.get("every") is None else max(1, int(checkpoint["every"])),
                mtbf=None if checkpoint.get("mtbf") is None else float(checkpoint["mtbf"]),
                since=int(body.get("since") or 0),
                seed=seed
                and Seed(
                    str(seed["channel"]),
                    int(seed["life"]),
                    int(seed["step"]),
                    str(seed.get("run", "")),
                    dict(seed.get("store") or {}),
                ),
                store=dict(body.get("store") or {}),
                local=str(checkpoint.get("local") or ""),
                local_interval=float(checkpoint.get("local_interval") or 120.0),
            )
        except KeyError as error:
            raise Unusable(f"the payload lacks the field {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"the payload has a field of the wrong kind: {error}") from None
        if job.launch not in LAUNCHES:
            raise Unusable(f"launch is {job.launch!r}: must be one of {', '.join(LAUNCHES)}")
        if job.nodes < 1 or job.ranks_per_node < 1 or not job.command:
            raise Unusable("nodes and ranks_per_node must be at least 1, and the command not empty")
        return job

    def redact(self, text: str) -> str:
        """The text without the values of secrets: what leaves the job with a failure travels to Airflow's XCom."""
        try:
            return _hidden(self.secrets().values(), text)
        except Unusable:
            return text

    def secrets(self) -> Dict[str, str]:
        """Further environment, never logged. Raises Unusable without showing a value."""
        if self.secrets_file is None:
            return {}
        try:
            with open(self.secrets_file, encoding="utf-8") as file:
                body = json.load(file)
            return {str(name): str(value) for name, value in body.items()}
        except OSError as error:
            raise Unusable(f"cannot read the secrets file {self.secrets_file}: {error.strerror}") from None
        except (ValueError, AttributeError):
            raise Unusable(f"the secrets file {self.secrets_file} is no JSON object") from None


def _hidden(values: Iterable[str], text: str) -> str:
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


def _located(word: str, payload: str) -> str:
    if word == PYTHON_WORD:
        return sys.executable or "python3"
    return payload + word[len(PAYLOAD_WORD) :] if word.startswith(PAYLOAD_WORD + "/") else word


@dataclass(frozen=True)
class Node:
    """Who this node is. ``gpus`` is None when the platform did not say which devices there are."""

    rank: int
    job_id: str
    restart: Optional[int]  # None: the platform does not count
    address: str
    host: str = field(default_factory=socket.gethostname)
    gpus: Optional[Tuple[str, ...]] = None
    start: str = ""  # where it is not counted: what tells this start of this node from any other

    @classmethod
    def of(cls, job: Job, env: Mapping[str, str]) -> Node:
        """By the table of the contract. Raises Unusable."""
        rank = _number(env, ("GANG_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"))
        if rank is None:
            if job.nodes > 1:
                raise Unusable(
                    "which node is this? Set GANG_NODE_RANK (or SLURM_NODEID, JOB_COMPLETION_INDEX)"
                )
            rank = 0
        if not 0 <= rank < job.nodes:
            raise Unusable(f"node rank {rank} of a gang of {job.nodes} nodes")
        job_id = _first(env, ("GANG_JOB_ID", "SLURM_JOB_ID"))
        if job_id is None:
            if job.nodes > 1:
                raise Unusable("which job is this? Set GANG_JOB_ID (or SLURM_JOB_ID), the same on all nodes")
            job_id = f"unnamed-{secrets.token_hex(8)}"
        counted = env.get("GANG_RESTART") != UNCOUNTED
        restart = (_number(env, ("GANG_RESTART", "SLURM_RESTART_COUNT")) or 0) if counted else None
        gpus = _first(env, ("GANG_GPUS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"))
        # The platform's name of the node where it gives one: what it blames and excludes goes by that.
        machine = socket.gethostname()
        host = _first(env, ("GANG_NODE_NAME", "SLURMD_NODENAME")) or machine
        return cls(
            rank=rank,
            job_id=job_id,
            restart=restart,
            start=env.get("GANG_START", ""),
            address=_first(env, ("GANG_NODE_ADDR",)) or own_address(machine, alone=job.nodes == 1),
            host=host,
            gpus=None if gpus is None else tuple(part.strip() for part in gpus.split(",") if part.strip()),
        )


def _first(env: Mapping[str, str], names: Tuple[str, ...]) -> Optional[str]:
    for name in names:
        if env.get(name):
            return env[name]
    return None


def _number(env: Mapping[str, str], names: Tuple[str, ...]) -> Optional[int]:
    text = _first(env, names)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise Unusable(f"{' / '.join(names)}: {text!r} is no number") from None


def own_address(host: str, alone: bool) -> str:
    """The first address of the host name that others can reach; loopback for a gang of one node.

    Debian maps the host name to 127.0.1.1. Then the address from which this
    machine would send to the outside is taken; asking for it sends nothing.
    """
    if alone:
        return "127.0.0.1"
    found: List[str] = []
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        pass
    for address in found:
        if not address.startswith("127.") and address != "::1":
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that belongs to nobody (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return found[0] if found else host
