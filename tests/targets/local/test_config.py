"""What may be declared, and that a wrong declaration says what would do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.targets.local import ConfigError, LocalConfig, LocalTarget
from airflow_gpu.targets.local.config import local_path


def test_defaults() -> None:
    config = LocalConfig()
    assert config.folder == Path("~/.airflow-gpu/local").expanduser()
    assert config.channel_folder == config.folder / "runs"
    assert config.python == sys.executable
    assert (config.grace, config.requeue, config.nodes) == (30.0, False, 1)


def test_from_a_connection_where_numbers_are_text() -> None:
    config = LocalConfig.from_mapping(
        {
            "path": "/scratch/gpu",
            "nodes": "2",
            "gpus_per_node": "",
            "requeue": "true",
            "grace": "12.5",
            "pass_env": "WANDB_*, FOO",
            "accelerator": None,
        }
    )
    assert (config.nodes, config.gpus_per_node, config.requeue, config.grace) == (2, None, True, 12.5)
    assert config.pass_env == ("WANDB_*", "FOO")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"path": "here"}, "path must be absolute (or begin with ~), got 'here'"),
        ({"nodes": 0}, "nodes must be a whole number, 1 to 250, got 0"),
        ({"nodes": "many"}, "nodes must be a whole number, got 'many'"),
        ({"nodes": True}, "nodes must be a whole number, got True"),
        ({"gpus_per_node": -1}, "gpus_per_node must be a whole number, 0 or more, got -1"),
        ({"grace": "nan"}, "grace must be a number of 0 or more, got nan"),
        ({"idle_exit": 0}, "idle_exit must be a number above 0, got 0.0"),
        ({"requeue": "perhaps"}, "requeue must be true or false, got 'perhaps'"),
        ({"accelerator": " "}, "accelerator must not be empty"),
        ({"channel": "hdfs://name/x"}, "channel must be a folder of this machine"),
        (
            {"channel": "hdfs://name/x"},
            "channel must be a folder of this machine (a path or file:///...) or one of s3://, gs://, az://, abfs://, abfss://, got 'hdfs://name/x'",
        ),
        ({"channel": "s3://"}, "channel must be a folder, or bucket and prefix such as s3://bucket/gangs"),
        ({"channel": "s3://key:hunter2@bucket"}, "channel must be a folder, or bucket and prefix such as s3"),
        (
            {"channel": "az://bucket/x?sig=hunter2"},
            "channel must be a folder, or bucket and prefix such as az",
        ),
        ({"channel": "runs"}, "channel must be an absolute path, got 'runs'"),
        ({"gpu_per_node": 1}, "unknown field 'gpu_per_node'; known are "),
        ({"pass_env": 3}, "pass_env must be a list of names, got 3"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalConfig.from_mapping(fields)
    assert str(caught.value).startswith(said)
    assert "hunter2" not in str(caught.value)


def test_the_channel_is_a_uri_for_airflow_and_a_folder_for_ranks() -> None:
    target = LocalTarget("here", LocalConfig(channel="file:///scratch/my%20runs"))
    assert target.channel == "file:///scratch/my%20runs"
    assert target.job_channel == "/scratch/my runs"
    assert local_path("/a%20b", "x") == Path("/a%20b")
    assert target.capabilities.shared_path


def test_a_channel_on_an_object_store_is_the_same_uri_for_both() -> None:
    target = LocalTarget("here", LocalConfig(channel="s3://gangs/prod/"))
    assert target.channel == target.job_channel == "s3://gangs/prod"
    assert target.config.channel_folder is None
    assert not target.capabilities.shared_path
