"""What a DAG author asks for: a gang, and how it is placed, saved and recovered.

Purpose: :class:`Gang` is the whole request, frozen and checked when the DAG is
parsed, so that a wrong one is a DAG import error with a sentence that says what
would be right, and never a job that waits for a day and then fails.

What it does not do: it knows no target, no price and no clock, and resolves no
secret and no template.

All durations are seconds (float) and all sizes are bytes (int) once the object
is made, whatever the author wrote. At parse time any field may instead hold a
Jinja string or an XComArg, unchanged; ``gang.templated`` tells. The operator
lets Airflow render ``gang.fields()`` and makes the real request with
:meth:`Gang.from_fields`.

Example::

    Gang(
        nodes=8,
        gpus_per_node=8,
        accelerator="H100",
        command="torchrun --nproc-per-node 8 train.py --epochs {{ params.epochs }}",
        launch="node",
        secrets={"HF_TOKEN": "conn:huggingface#password"},
        time_limit="12h",
        targets=["slurm_a", "eks_spot"],
        placement={"deadline": "2d"},
    )
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, model_validator

from airflow_gpu.gang._explain import SECRET_NAME, named
from airflow_gpu.gang._fields import (
    RESERVED_ENV,
    Bytes,
    Command,
    Duration,
    Env,
    Function,
    Gpus,
    Nodes,
    PerNode,
    Priority,
    Script,
    Seconds,
    Secrets,
    SomeSeconds,
    Targets,
    Text,
    Whole,
    work_of,
)
from airflow_gpu.gang._model import Part, beyond, is_template, known, mode_of, templates
from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.parts import Checkpointing, Placement, Recovery, Work
from airflow_gpu.gang.units import GangError, GangWarning

__all__ = [
    "RESERVED_ENV",
    "Checkpointing",
    "FunctionSource",
    "Gang",
    "GangError",
    "GangWarning",
    "Placement",
    "Recovery",
    "Work",
]

VERSION: Final = 1

BACKFILL_BEHIND: Final = 1000
"""By how much the priority of a backfill is lower, unless said otherwise."""

# Where "{#" is not the beginning of a comment to Jinja.
_QUOTED: Final = re.compile(r"\{%-?\s*raw\b.*?\bendraw\s*-?%\}|\{\{.*?\}\}", re.DOTALL)
# A secret that a template would write into the request, and so into the journal.
_RENDERS_SECRET: Final = re.compile(
    r"\{[{%][^}]*\bconn\.[^}]*\b(?:password|get_password|extra|extra_dejson|get_uri)\b"
)


class Gang(Part):
    """N nodes x M GPUs that start together or not at all, and what they run.

    :param nodes: nodes. Default 1.
    :param gpus_per_node: GPUs on each node; 0 for none. Default 1.
    :param ranks_per_node: ranks on each node. None (default): one a GPU, or 1 without GPUs. With GPUs it is
        a multiple of ``gpus_per_node`` or divides it, so that all ranks have the same share.
    :param accelerator: kind of GPU, such as ``"H100"``. None (default): any.
    :param cpus: CPUs of each node. None (default): the target's share.
    :param memory: memory of each node, ``"64GiB"``, ``"64Gi"``, ``"64GB"`` or bytes; at least 1 MiB.
        None (default): the target's share.
    :param image: container image. None (default): the target's.
    :param command: the program: a list of arguments, or text that is split as a shell does. The split comes
        after the rendering: a value with spaces becomes several arguments there, and stays one in a list.
    :param script: text of a shell script, run by ``bash -euo pipefail``.
    :param function: a Python function, sent as source, see
        :class:`~airflow_gpu.gang.function.FunctionSource`. Exactly one of the three is given.
    :param launch: ``"rank"`` (default): one process for each rank; ``"node"``: one on each node, a launcher
        such as torchrun; ``"head"``: one on node 0, such as mpirun. A function runs on every rank.
    :param env: added to the environment of the ranks, and recorded in plain text. Default empty.
    :param secrets: environment by reference: ``"conn:<connection id>#password"`` (or ``#login``, ``#host``,
        ``#extra.<key>``) or ``"var:<variable>"``. Default empty.
    :param time_limit: longest run of one life. Default 24 h.
    :param barrier_timeout: how long the first nodes of a life wait for the others, before it is given up as
        not whole. Default 5 min.
    :param stop_grace: time from notice to kill, in which the ranks save. Default 30 s.
    :param work: hours of work, or :class:`~airflow_gpu.gang.parts.Work`. None (default): unknown, and offers
        are compared by rate only.
    :param priority: larger goes first, where a target has priorities. Default 0.
    :param backfill_priority: the same in a backfill. None (default): 1000 less, so that a backfill waits for
        scheduled and manual runs.
    :param min_nodes: the gang may run with as few as this (1 to ``nodes``) where the target is elastic.
        None (default): all or nothing.
    :param topology: the network domain that the nodes share, in the target's words. None (default): any.
    :param targets: Airflow connection ids of the targets that may be used: a list, or text (comma
        separated). Default ``"gpu_default"``.
    :param placement: :class:`~airflow_gpu.gang.parts.Placement`: limits on waiting, and the deadline.
    :param checkpointing: :class:`~airflow_gpu.gang.parts.Checkpointing`.
    :param recovery: :class:`~airflow_gpu.gang.parts.Recovery`: what it comes back from.
    :param team: who pays, in the ledger, and who may use a target. None (default): the DAG's owner.

    Raises :class:`~airflow_gpu.gang.units.GangError`, one line for each thing that is wrong, and warns
    (:class:`~airflow_gpu.gang.units.GangWarning`) of values that look like secrets.

    Durations are seconds, a ``timedelta``, or text such as ``"90m"``, ``"1h30m"``, ``"2d"``.

    >>> Gang(nodes=2, gpus_per_node=8, command="python train.py").world_size
    16
    """

    CONTAINERS: ClassVar[frozenset[str]] = frozenset(
        {"command", "env", "secrets", "work", "targets", "placement", "checkpointing", "recovery"}
    )

    nodes: Nodes = 1
    gpus_per_node: Gpus = 1
    ranks_per_node: PerNode | None = None
    accelerator: Text | None = None
    cpus: PerNode | None = None
    memory: Bytes | None = None
    image: Text | None = None
    command: Command | None = None
    script: Script | None = None
    function: Function = None
    launch: Literal["rank", "node", "head"] = "rank"
    env: Env = Field(default_factory=dict)
    secrets: Secrets = Field(default_factory=dict)
    time_limit: SomeSeconds = 86400.0
    barrier_timeout: SomeSeconds = 300.0
    stop_grace: Seconds = 30.0
    work: Annotated[Work, BeforeValidator(work_of)] | None = None
    priority: Priority = 0
    backfill_priority: Priority | None = None
    min_nodes: Nodes | None = None
    topology: Text | None = None
    targets: Targets = ("gpu_default",)
    placement: Placement = Placement()
    checkpointing: Checkpointing = Checkpointing()
    recovery: Recovery = Recovery()
    team: Text | None = None

    _final: bool = PrivateAttr(default=False)  # nothing is left to render
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    if TYPE_CHECKING:
        # What an author may write. (At run time pydantic reads the fields above.)
        def __init__(
            self,
            *,
            nodes: Whole = 1,
            gpus_per_node: Whole = 1,
            ranks_per_node: Whole | None = None,
            accelerator: str | None = None,
            cpus: Whole | None = None,
            memory: Whole | None = None,
            image: str | None = None,
            command: str | Sequence[str | float] | None = None,
            script: str | None = None,
            function: Callable[..., Any] | FunctionSource | None = None,
            launch: str = "rank",
            env: Mapping[str, str | float] | str = ...,
            secrets: Mapping[str, str] | str = ...,
            time_limit: Duration = ...,
            barrier_timeout: Duration = ...,
            stop_grace: Duration = ...,
            work: float | str | Work | Mapping[str, Any] | None = None,
            priority: Whole = 0,
            backfill_priority: Whole | None = None,
            min_nodes: Whole | None = None,
            topology: str | None = None,
            targets: str | Sequence[str] = ...,
            placement: Placement | Mapping[str, Any] | str = ...,
            checkpointing: Checkpointing | Mapping[str, Any] | str = ...,
            recovery: Recovery | Mapping[str, Any] | str = ...,
            team: str | None = None,
        ) -> None: ...

    @model_validator(mode="after")
    def _remember_mode(self, info: ValidationInfo) -> Self:
        self._final = mode_of(info) != "written"
        return self

    @classmethod
    def _across(cls, data: Mapping[str, Any], wrong: set[str]) -> Iterator[str]:
        programs = named(data, ("command", "script", "function"))
        if not programs:
            yield "command, script or function is required: what is the gang to run?"
        elif len(programs) > 1 and not any(is_template(data[name]) for name in programs):
            yield f"only one of command, script and function can be given, got {' and '.join(programs)}"
        launch = data.get("launch", "rank")
        if launch in ("node", "head") and programs == ["function"] and not is_template(data["function"]):
            yield f"launch must be 'rank' for a function: it runs on every rank, got {launch!r}"

        def number(name: str) -> int | None:
            # None when it is not given, wrong by itself, or still to be rendered.
            value = data.get(name, cls.model_fields[name].default)
            return value if isinstance(value, int) and name not in wrong else None

        nodes, least = number("nodes"), number("min_nodes")
        if nodes is not None and least is not None and least > nodes:
            yield f"min_nodes must be at most nodes ({nodes}), got {least}"
        gpus, ranks = number("gpus_per_node"), number("ranks_per_node")
        if gpus and ranks and ranks % gpus and gpus % ranks:
            yield (
                f"ranks_per_node must be a multiple of gpus_per_node ({gpus}) or divide it, "
                f"so that all ranks have the same share, got {ranks}"
            )
        targets, recovery = data.get("targets"), data.get("recovery")
        moves = (
            recovery.get("unreachable")
            if isinstance(recovery, Mapping)
            else getattr(recovery, "unreachable", "")
        )
        if moves == "move" and "targets" not in wrong and not is_template(targets) and len(targets or ()) < 2:
            yield "recovery.unreachable='move' needs another target to move to: list two or more in targets"
        env, secrets = data.get("env"), data.get("secrets")
        if isinstance(env, Mapping) and isinstance(secrets, Mapping):
            for name in sorted(set(env) & set(secrets), key=str):
                yield f"env.{name} is in secrets too: give it once"

    def _advice(self) -> Iterator[str]:
        env = self.env if isinstance(self.env, Mapping) else {}
        for name, value in env.items():
            harmless = not isinstance(value, str) or value.replace(".", "").isdigit() or not value
            if not harmless and SECRET_NAME.search(name):
                yield (
                    f"env.{name} looks like a secret, and env is recorded in plain text; "
                    f'use secrets={{"{name}": "conn:<connection id>#password"}}'
                )
            elif isinstance(value, str) and _RENDERS_SECRET.search(value):
                yield f"env.{name} would record a connection's secret in plain text; use secrets"
        for name in ("command", "script"):
            text = " ".join(map(str, value)) if isinstance(value := getattr(self, name), tuple) else value
            if isinstance(text, str) and "{#" in _QUOTED.sub("", text):
                yield f"{name} has '{{#', where Jinja begins a comment; write {{{{ '{{#' }}}}"
            if isinstance(text, str) and _RENDERS_SECRET.search(text):
                yield f"{name} would record a connection's secret in plain text; use secrets"

    @property
    def templated(self) -> bool:
        """Some field is still to be rendered. Never so for what ``from_fields`` (rendered) or ``from_json`` made."""
        return not self._final and any(templates(self.fields()))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of a newer version that ``from_json`` met and left out, such as ``"recovery.new"``."""
        return self._ignored

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole gang, as torchrun and MPI count them."""
        return self.nodes * self.ranks

    def for_backfill(self) -> Self:
        """The same as a backfill asks for it."""
        lower = self.priority - BACKFILL_BEHIND if self.backfill_priority is None else self.backfill_priority
        return self.replace(priority=max(-(10**9), lower))

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang."""
        return self.nodes * self.gpus_per_node

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, rendered: bool = True) -> Self:
        """The real request, from :meth:`fields` as Airflow rendered them.

        :param fields: as :meth:`fields` gives them; what is missing has its default.
        :param rendered: False: Airflow has not rendered them yet, so templates pass, as in the constructor.

        Rendered text is taken for what it stands for: ``"2"`` for a number,
        ``""`` and ``"None"`` for an optional field that is not given, and a
        dict or list as Python or ``tojson`` prints it. No text counts as a
        template any more. Raises GangError.
        """
        return cls._from(fields, "rendered" if rendered else "written")

    def replace(self, **changes: Any) -> Self:
        """This request with some fields changed, and checked again. Raises GangError."""
        fields = {**self.fields(), **changes}
        return self._from(fields, "recorded") if self._final else type(self)(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The whole request as JSON values: ``{"version": 1, ...}``. Raises GangError while ``templated``."""
        data = self.fields()
        if self.templated:
            raise GangError("Gang", f"is not rendered yet: {', '.join(templates(data))}")
        return {"version": VERSION, **data, "function": self.function and self.function.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads :meth:`to_dict` of any version.

        What an older version did not write has its default; what only a newer
        one knows is left out and named in ``ignored``. Raises GangError.
        """
        if not isinstance(data, Mapping):
            raise GangError("Gang", f"must be a JSON object, got {type(data).__name__}")
        version = data.get("version", VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise GangError("Gang", f"version must be a number from 1, got {version!r}")
        kept, ignored = known(cls, {name: value for name, value in data.items() if name != "version"})
        if isinstance(function := kept.get("function"), Mapping):
            ignored += tuple(f"function.{name}" for name in function if name not in FunctionSource.KNOWN)
        made = cls._from(kept, "recorded")
        made._ignored = ignored
        return made

    def to_json(self) -> str:
        """:meth:`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads :meth:`to_json` of any version, as :meth:`from_dict` does. Raises GangError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GangError("Gang", f"is no JSON: {error}") from None
        return cls.from_dict(data)

    def digest(self) -> str:
        """SHA-256, 64 hex digits, of the request without what is at its default.

        So a version that adds a field gives a request without it the same digest,
        and a job that runs during an upgrade is recognised after it.
        """
        data = beyond(self.to_dict(), _DEFAULTS)
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_DEFAULTS: Final = {**Gang(script="-").to_dict(), "script": None}
