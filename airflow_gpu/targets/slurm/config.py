"""What a person declares of a Slurm cluster, from the Airflow connection.

Purpose: one frozen object, checked when it is made, whose errors name the field and say
what would do.

What it does not do: contact anything. Secrets are in it as :class:`pydantic.SecretStr`,
so that no repr and no error shows them.

Example::

    SlurmConfig.from_mapping({"url": "https://slurm:6820", "user": "svc", "token": "...", "partition": "train",
                              "channel": "sftp://svc@login/shared/gangs"})
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

OBJECT_STORES: Final = ("s3", "gs", "az", "abfs", "abfss")

PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
"""Names in Slurm: of partitions, accounts, QOS, reservations, GPU types."""

FOLDER: Final = re.compile(r"/[A-Za-z0-9._@+=,/-]*")
"""Folders on the cluster. They come into ``#SBATCH`` lines, where ``%`` and blanks mean something."""

CONSTRAINT: Final = re.compile(r"[A-Za-z0-9._&|()*\[\]!,:-]+")

OURS: Final = frozenset(
    [
        "job-name",
        "J",
        "comment",
        "nodes",
        "N",
        "ntasks",
        "n",
        "ntasks-per-node",
        "gres",
        "gpus",
        "G",
        "gpus-per-node",
        "gpus-per-task",
        "cpus-per-task",
        "c",
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "partition",
        "p",
        "account",
        "A",
        "qos",
        "q",
        "reservation",
        "constraint",
        "C",
        "switches",
        "exclusive",
        "time",
        "t",
        "signal",
        "requeue",
        "no-requeue",
        "nice",
        "exclude",
        "x",
        "nodelist",
        "w",
        "output",
        "o",
        "error",
        "e",
        "open-mode",
        "chdir",
        "D",
        "export",
        "export-file",
        "wrap",
        "array",
        "a",
        "dependency",
        "d",
        "hold",
        "H",
        "parsable",
        "Q",
        "quiet",
        "W",
        "wait",
        "input",
        "i",
        "uid",
        "gid",
        "get-user-env",
        "test-only",
        "clusters",
        "M",
        "wckey",
    ]
)
"""Options of sbatch that this package sets, or that would take the job from under it."""

REST_OURS: Final = frozenset(
    [
        "name",
        "comment",
        "nodes",
        "minimum_nodes",
        "maximum_nodes",
        "tasks",
        "tasks_per_node",
        "gres",
        "tres_per_node",
        "tres_per_job",
        "tres_per_task",
        "cpus_per_task",
        "memory_per_node",
        "memory_per_cpu",
        "partition",
        "account",
        "qos",
        "reservation",
        "constraints",
        "required_switches",
        "shared",
        "exclusive",
        "time_limit",
        "kill_warning_signal",
        "kill_warning_delay",
        "requeue",
        "nice",
        "excluded_nodes",
        "required_nodes",
        "standard_output",
        "standard_error",
        "standard_input",
        "open_mode",
        "current_working_directory",
        "environment",
        "script",
        "array",
        "dependency",
        "hold",
    ]
)


class ConfigError(ValueError):
    """A field of the connection cannot be used. The message names it and says what would do."""


def _split(value: Any) -> Any:
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def _shell_words(value: Any) -> Any:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _lines(value: Any) -> Any:
    return tuple(value.splitlines()) if isinstance(value, str) else value


def _table(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a JSON object of names and values") from None


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Words = Annotated[tuple[str, ...], BeforeValidator(_shell_words)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines)]
Types = Annotated[Mapping[str, str], BeforeValidator(_table)]
Table = Annotated[Mapping[str, Any], BeforeValidator(_table)]


class SlurmConfig(BaseModel):
    """A cluster as it is declared.

    :param url: how Slurm is reached: ``https://host:6820`` or ``http://`` (slurmrestd), ``unix:///run/slurmrestd.sock``
        (the same, on this machine), ``ssh://user@login:22`` (its commands on a login node), ``local`` (its commands here).
    :param user: REST: the user that the jobs run as. Default: whose the token is.
    :param token: REST: a JWT of ``scontrol token``. It is seen when it is over.
    :param token_command: REST: a command whose last line of output is a token; run again before one is over.
    :param token_ssh: REST: ``ssh://user@login``; ``scontrol token`` is run there.
    :param token_lifespan: seconds that a token from ``token_ssh`` is asked for.
    :param ca_file: REST: certificates that the server's is checked with.
    :param verify: REST: False takes any certificate.
    :param api_version: REST: such as ``v0.0.42``. Default: the newest that both sides know.
    :param command_prefix: put before each command of Slurm where ``url`` is ``local``, such as
        ``kubectl exec -i deploy/slurm-login --``.
    :param channel: where gangs put records, logs and checkpoints, as Airflow reaches it: a folder that is mounted here
        (``file:///mnt/gangs``), ``sftp://user@login/shared/gangs``, or an object store.
    :param job_channel: the same folder as the nodes see it. Default: the path of ``channel``.
    :param secrets_folder: URI like ``channel``, below which secrets are put for the jobs as files of mode 0600.
        Default: the channel, where that is a folder.
    :param job_secrets_folder: the same folder as the nodes see it.
    :param python: interpreter of the agents on the nodes, 3.8 or later.
    :param partition: one or several; Slurm takes the one that starts first.
    :param gpu_types: names of GPUs in DAGs -> types in Slurm's ``gres.conf``, such as ``{"H100": "h100"}``.
        Default: the name in lower case.
    :param gres: name of the GPUs' generic resource.
    :param cpus_per_gpu: CPUs of each node by its GPUs, for gangs that do not say. Default: the cluster's.
    :param memory_per_gpu: MiB by GPU, likewise.
    :param exclusive: whole nodes, whatever the gang asks for.
    :param requeue: Slurm starts a preempted gang, or one that lost a node, again by itself. False: Airflow submits it
        again, here or elsewhere.
    :param modules: loaded with ``module load`` before the agents start.
    :param prologue: lines of shell that are run on the first node before them.
    :param mpi: ``srun --mpi``.
    :param login_shell: the batch script is run by a login shell (``/etc/profile``, modules).
    :param sbatch_options: further options of sbatch, such as ``--gpu-bind=closest``; not over REST.
    :param rest_fields: further fields of a REST job, such as ``{"licenses": "x:1"}``.
    :param srun_options: further options of the one srun.
    :param container: how ``Gang.image`` is run.
    :param container_mounts: ``source:target`` pairs beside the channel.
    :param work_folder: the job's working directory, which must exist on the nodes.
    :param grace: seconds that preempted jobs have (GraceTime of the QOS or partition), where Airflow cannot read it.
    :param kill_wait: the cluster's KillWait. Default: asked for, which REST cannot.
    :param price_per_gpu_hour: in US dollars, for the choice among targets.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True
    )

    url: str = ""
    user: str | None = None
    token: SecretStr | None = None
    token_command: Words = ()
    token_ssh: str | None = None
    token_lifespan: int = Field(3600, ge=60, le=30 * 86400)
    ca_file: str | None = None
    verify: bool = True
    api_version: str | None = Field(None, pattern=r"^v0\.0\.\d\d$")
    command_prefix: Words = ()
    ssh: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    channel: str
    job_channel: str | None = None
    secrets_folder: str | None = None
    job_secrets_folder: str | None = None
    python: str = "python3"
    partition: Names = ()
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    gpu_types: Types = Field(default_factory=dict)
    gres: str = "gpu"
    cpus_per_gpu: int | None = Field(None, ge=1)
    memory_per_gpu: int | None = Field(None, ge=1)
    exclusive: bool = False
    requeue: bool = False
    modules: Names = ()
    prologue: Lines = ()
    mpi: str = "none"
    login_shell: bool = True
    sbatch_options: Words = ()
    rest_fields: Table = Field(default_factory=dict)
    srun_options: Words = ()
    container: Literal["", "pyxis", "apptainer", "oci"] = ""
    container_mounts: Names = ()
    work_folder: str = "/tmp"
    grace: float | None = Field(None, ge=0)
    kill_wait: float | None = Field(None, ge=0)
    price_per_gpu_hour: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _together(self) -> SlurmConfig:
        scheme = self.scheme
        if scheme not in ("http", "https", "unix", "ssh", "local"):
            raise ValueError(
                "url must be https://host:6820 (slurmrestd), unix:///run/slurmrestd.sock, ssh://user@login (a login "
                f"node) or 'local' (Slurm's commands on this machine), got {_shown(self.url)!r}"
            )
        if "@" in urlsplit(self.url).netloc and scheme != "ssh":
            raise ValueError("url must have no user and no password: they have fields of their own")
        if scheme in ("http", "https"):
            if not (self.token or self.token_command or self.token_ssh):
                raise ValueError(
                    "a token is missing: put a JWT (scontrol token) into the password, or set token_command or token_ssh"
                )
            if self.sbatch_options:
                raise ValueError("sbatch_options do not exist over REST: use rest_fields")
        elif self.rest_fields:
            raise ValueError("rest_fields exist over REST only: use sbatch_options")
        for name, pattern, kind in _PATTERNS:
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value is not None and not pattern.fullmatch(value):
                    raise ValueError(f"{name} must be {kind}, got {value!r}")
        for accelerator, kind in self.gpu_types.items():
            if not PLAIN.fullmatch(kind):
                raise ValueError(f"gpu_types: {accelerator!r} must be a type of gres.conf, got {kind!r}")
        for option in self.sbatch_options:
            name = option.lstrip("-").partition("=")[0]
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"sbatch_options must each be --name or --name=value, got {option!r}")
            if name in OURS or (not option.startswith("--") and name[:1] in OURS):
                raise ValueError(
                    f"sbatch_options: --{name} is set by the gang or by a field of the connection"
                )
        for field in self.rest_fields:
            if field in REST_OURS:
                raise ValueError(f"rest_fields: {field!r} is set by the gang or by a field of the connection")
        self._channels()
        return self

    def _channels(self) -> None:
        for name in ("channel", "secrets_folder"):
            uri = getattr(self, name)
            if uri is None:
                continue
            scheme, mark, _ = uri.partition("://")
            known = ("file", "sftp", *OBJECT_STORES) if name == "channel" else ("file", "sftp")
            if (not mark and not uri.startswith("/")) or (mark and scheme not in known):
                raise ValueError(
                    f"{name} must be a folder (/mnt/gangs, sftp://user@login/shared/gangs)"
                    + (" or a prefix of an object store (s3://, gs://, az://)" if name == "channel" else "")
                )
            if mark and urlsplit(uri).password:
                raise ValueError(
                    f"{name} must have no password in it: [gpu] store_conn_ids names its connection"
                )
        if self.shared_folder is not None and not FOLDER.fullmatch(self.shared_folder):
            raise ValueError(
                f"job_channel must be an absolute folder of letters, digits and ._@+=,-/ on the nodes, got "
                f"{self.shared_folder!r}"
            )
        if self.shared_folder is None and self.job_channel is not None:
            raise ValueError(
                "job_channel has a meaning only where channel is a folder: jobs reach a store by its URI"
            )

    @property
    def scheme(self) -> str:
        return "local" if self.url in ("", "local") else self.url.partition(":")[0]

    @property
    def rest(self) -> bool:
        return self.scheme in ("http", "https", "unix")

    @property
    def shared_folder(self) -> str | None:
        """The channel as a folder of the nodes; None on an object store."""
        if self.job_channel is not None:
            return self.job_channel.rstrip("/") or "/"
        return _folder(self.channel)

    @property
    def channel_uri(self) -> str:
        """The channel as Airflow opens it, written as a store writes it: without a port that says nothing."""
        if "://" not in self.channel:
            return f"file://{self.channel.rstrip('/')}"
        parts = urlsplit(self.channel.rstrip("/"))
        usual = parts.scheme == "sftp" and parts.port == 22
        return (
            urlunsplit(parts._replace(netloc=parts.netloc.removesuffix(":22"))) if usual else parts.geturl()
        )

    def gpu_type(self, accelerator: str | None) -> str | None:
        """The type in ``gres.conf`` for a name of a DAG."""
        if accelerator is None:
            return None
        folded = {name.lower(): kind for name, kind in self.gpu_types.items()}
        return folded.get(accelerator.lower(), accelerator.lower())

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> SlurmConfig:
        """From a connection's fields, where numbers may be text. Unknown fields are errors.

        :raises ConfigError: naming the field; without any value that may be secret.
        """
        try:
            return cls.model_validate(
                {name: value for name, value in given.items() if value not in (None, "")}
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            known = (
                f"; known are {', '.join(sorted(cls.model_fields))}"
                if first["type"] == "extra_forbidden"
                else ""
            )
            words = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{where}: {words}{known}" if where else words) from None


_PATTERNS: Final = (
    ("partition", PLAIN, "names of partitions"),
    ("account", PLAIN, "the name of an account"),
    ("qos", PLAIN, "the name of a QOS"),
    ("reservation", PLAIN, "the name of a reservation"),
    ("constraint", CONSTRAINT, "features as sbatch --constraint has them"),
    ("gres", PLAIN, "the name of a generic resource"),
    ("mpi", PLAIN, "a type of srun --mpi=list"),
    ("modules", re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*"), "names of modules"),
    ("work_folder", FOLDER, "an absolute folder on the nodes"),
)


def _folder(uri: str) -> str | None:
    scheme, mark, _ = uri.partition("://")
    if not mark:
        return uri.rstrip("/") or "/"
    if scheme in ("file", "sftp"):
        return unquote(urlsplit(uri).path).rstrip("/") or "/"
    return None


def _shown(url: str) -> str:
    """Without what may be a password."""
    return re.sub(r"//[^@/]*@", "//***@", url)
