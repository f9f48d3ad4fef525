"""The rendered scripts and REST jobs, as golden files: a change is a reviewed diff. And what hostile values become."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu.hooks.slurm import make_target
from airflow_gpu.targets.base import PAYLOAD, Job, Rejected
from airflow_gpu.targets.slurm.batch import packed, script
from airflow_gpu.targets.slurm.config import ConfigError, SlurmConfig
from airflow_gpu.targets.slurm.identity import of_comment, to_comment
from airflow_gpu.targets.slurm.target import SlurmTarget

GOLDEN = Path(__file__).parent / "golden"
FOLDER = "/shared/gangs/v1/prod/train/run-1/fit/_/abcdefghij/payload/0001"
LABELS = {
    "airflow-gpu/installation": "prod",
    "airflow-gpu/incarnation": "abcdefghij",
    "airflow-gpu/attempt": "1",
}


def target(**fields: Any) -> SlurmTarget:
    given = {"url": "local", "channel": "sftp://svc@login/shared/gangs", **fields}
    return make_target("slurm", SlurmConfig.from_mapping(given))


def job(**more: Any) -> Job:
    shape: dict[str, Any] = {
        "name": "train-fit-k3j2h1-1",
        "labels": LABELS,
        "attempt": 1,
        "digest": "sha256:" + "ab" * 32,
        "nodes": 8,
        "gpus_per_node": 8,
        "ranks_per_node": 8,
        "payload": FOLDER,
        "channel": FOLDER.removesuffix("/payload/0001"),
        "time_limit": 86400.0,
        "argv": ("python3", f"{FOLDER}/runtime.pyz", "agent", f"{FOLDER}/job.json"),
        "stop_grace": 120.0,
    }
    return Job(**{**shape, **more})


CARRIED: dict[str, Any] = {
    "payload": PAYLOAD,
    "channel": "s3://bucket/gangs/x",
    "argv": ("python3", f"{PAYLOAD}/runtime.pyz", "agent", f"{PAYLOAD}/job.json"),
    "files": {"job.json": b"{}", "runtime.pyz": bytes(range(60))},
}

SCRIPTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "everything": (
        {
            "partition": "train,spare",
            "account": "research",
            "qos": "normal",
            "reservation": "llm",
            "constraint": "nvlink&ib",
            "gpu_types": {"H100-80GB": "h100"},
            "cpus_per_gpu": 12,
            "memory_per_gpu": 64000,
            "exclusive": True,
            "requeue": True,
            "modules": "cuda/12.4 nccl",
            "prologue": "export NCCL_DEBUG=WARN\nulimit -l unlimited",
            "mpi": "pmix",
            "sbatch_options": "--gpu-bind=closest --wait-all-nodes=1",
            "srun_options": "--cpu-bind=cores",
        },
        {
            "accelerator": "H100-80GB",
            "topology": "switches=1",
            "priority": -1000,
            "exclude_hosts": ("gpu03", "gpu04"),
            "secrets": {"TOKEN": "never shown"},
        },
    ),
    "carried": ({"channel": "s3://bucket/gangs"}, CARRIED),
    "pyxis": (
        {"container": "pyxis", "container_mounts": "/data:/data"},
        {"image": "nvcr.io#nvidia/pytorch:26.01-py3"},
    ),
    "apptainer": ({"container": "apptainer"}, {"image": "/images/torch.sif"}),
    "oci": ({"container": "oci"}, {"image": "/images/bundle"}),
}


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{name} has changed: look at it, then GOLDEN=1 pytest {__file__}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    fields, more = SCRIPTS[name]
    batch = target(**fields)._submission.batch(job(**more), more.get("exclude_hosts", ()))
    golden(f"{name}.sh", batch.text)
    subprocess.run(["bash", "-n"], input=batch.text.encode(), check=True)


@pytest.mark.parametrize("version", [38, 40, 42])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_rest(name: str, version: int) -> None:
    fields, more = SCRIPTS[name]
    fields = {key: value for key, value in fields.items() if key != "sbatch_options"}
    batch = target(**fields)._submission.batch(job(**more), more.get("exclude_hosts", ()))
    golden(
        f"{name}-v0.0.{version}.json", json.dumps(batch.rest_job(version), indent=1, sort_keys=True) + "\n"
    )


def test_no_secret_in_what_is_submitted() -> None:
    batch = target()._submission.batch(job(secrets={"TOKEN": "hunter2-hunter2"}))
    assert "hunter2" not in batch.text + json.dumps(batch.rest_job(42))


words = st.text(min_size=1, max_size=30).filter(lambda text: "\0" not in text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(words, min_size=1, max_size=4), st.dictionaries(st.sampled_from(["A", "B_1"]), words, max_size=2)
)
def test_hostile_words_stay_words(argv: list[str], environment: dict[str, str]) -> None:
    """Whatever is in an argument or a value, the agent gets exactly that, and nothing else is run."""
    argv = [word.encode("utf-8", "surrogatepass").decode("utf-8", "ignore") or "x" for word in argv]
    environment = {name: value.encode("utf-8", "ignore").decode() for name, value in environment.items()}
    text = script(("PROBE", *argv), nodes=1, job_name="x", login_shell=False, environment=environment)
    probe = 'srun() { while [ "$1" != PROBE ]; do shift; done; shift; printf "%s\\0" "$@"; env -0; }\n'
    first, _, rest = text.partition("\n")
    done = subprocess.run(
        ["bash", "-c", f"{first}\n{probe}{rest}"],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    got = done.stdout.split(b"\0")
    assert got[: len(argv)] == [word.encode() for word in argv]
    for name, value in environment.items():
        assert f"{name}={value}".encode() in got


@given(
    st.dictionaries(st.text(max_size=20), st.text(max_size=30), max_size=5),
    st.text(max_size=40),
    st.text(max_size=40),
)
def test_comment(labels: dict[str, str], digest: str, channel: str) -> None:
    """One word that needs no quotes, and comes back as it was."""
    labels = {
        f"airflow-gpu/x{name.encode('utf-8', 'ignore').decode()}": value.encode("utf-8", "ignore").decode()
        for name, value in labels.items()
    }
    digest, channel = digest.encode("utf-8", "ignore").decode(), channel.encode("utf-8", "ignore").decode()
    text = to_comment(labels, digest, channel)
    assert text.isascii()
    assert not set(text) & set(" |\"'\\\n;$`")
    assert of_comment(text) == (labels, digest, channel)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"partition": "train;rm -rf"}, "partition must be names of partitions"),
        ({"constraint": "a b"}, "constraint must be features"),
        ({"account": "$(id)"}, "account must be the name of an account"),
        ({"job_channel": "/shared/a b"}, "job_channel must be an absolute folder"),
        ({"job_channel": "/shared/%u"}, "job_channel must be an absolute folder"),
        ({"url": "slurm.example.com"}, "url must be https://host:6820"),
        ({"url": "https://me:pw@slurm:6820", "token": "x"}, "url must have no user and no password"),
        ({"url": "https://slurm:6820"}, "a token is missing"),
        ({"sbatch_options": "--nodes=2"}, "--nodes is set by the gang"),
        ({"sbatch_options": "-N2"}, "is set by the gang"),
        ({"rest_fields": {"licenses": "x"}}, "rest_fields exist over REST only"),
        ({"channel": "ftp://x"}, "channel must be a folder"),
        ({"channel": "sftp://me:pw@login/x"}, "channel must have no password in it"),
        ({"colour": "blue"}, "colour: Extra inputs are not permitted; known are"),
        ({"token_lifespan": 1}, "token_lifespan"),
        ({"container": "docker"}, "container"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as found:
        target(**fields)
    assert says in str(found.value)
    assert "pw" not in str(found.value)


def test_what_cannot_be_run() -> None:
    for more, says in (
        ({"image": "x"}, "set 'container' of the connection"),
        ({"topology": "rack-7"}, "switches=1"),
        ({"payload": PAYLOAD}, "neither a payload in a folder nor files"),
        ({"payload": "/shared/a b/payload"}, "signs in its path"),
    ):
        with pytest.raises(Rejected, match=says):
            target()._submission.batch(job(**more), more.get("exclude_hosts", ()))


def test_a_payload_is_packed_the_same_each_time() -> None:
    files = {"b": b"2", "a": b"1"}
    assert packed(files) == packed(dict(reversed(files.items())))
