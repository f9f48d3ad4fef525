"""What Airflow is told of this package. Read at every start of every component: nothing is imported here."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Metadata by Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-gpu",
        "name": "GPU gangs",
        "description": "Gang-scheduled multi-node GPU steps that survive preemption.",
        "integrations": [
            {
                "integration-name": "GPU gangs",
                "external-doc-url": "https://github.com/airflow-gpu/airflow-gpu",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": "GPU gangs",
                "python-modules": ["airflow_gpu.operators.gang", "airflow_gpu.operators.sweep"],
            }
        ],
        "sensors": [{"integration-name": "GPU gangs", "python-modules": ["airflow_gpu.sensors.checkpoint"]}],
        "hooks": [
            {
                "integration-name": "GPU gangs",
                "python-modules": ["airflow_gpu.hooks.local", "airflow_gpu.hooks.slurm"],
            }
        ],
        "triggers": [
            {
                "integration-name": "GPU gangs",
                "python-modules": [
                    "airflow_gpu.triggers.checkpoint",
                    "airflow_gpu.triggers.gang",
                    "airflow_gpu.triggers.sweep",
                ],
            }
        ],
        "connection-types": [
            {
                "connection-type": "gpu_local",
                "hook-class-name": "airflow_gpu.hooks.local.LocalGangHook",
                "hook-name": "GPU gangs: this machine",
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "login", "password", "schema"],
                    "relabeling": {},
                    "placeholders": {},
                },
                "conn-fields": {
                    "path": _text(
                        "Folder", "Of the cluster's state, e.g. /var/lib/gangs. Default: ~/.airflow-gpu/local"
                    ),
                    "channel": _text(
                        "Channel",
                        "Where gangs put records, logs and checkpoints: a folder, or s3://bucket/prefix, gs://, az:// "
                        "(credentials: [gpu] store_conn_ids). Default: runs in the folder",
                    ),
                    "nodes": _number("Nodes", "Into how many nodes the GPUs are split. Default: 1"),
                    "gpus_per_node": _number("GPUs per node", "Empty: detected with nvidia-smi"),
                    "accelerator": _text("Accelerator", "Its name, e.g. H100. Empty: detected"),
                    "grace": _number(
                        "Grace (seconds)", "From the notice of a preemption to the kill. Default: 30"
                    ),
                    "requeue": _flag("Requeue", "Start a preempted gang again by itself, as Slurm does"),
                    "python": _text("Python", "Interpreter for the ranks. Default: the one Airflow runs in"),
                },
            },
            {
                "connection-type": "slurm",
                "hook-class-name": "airflow_gpu.hooks.slurm.SlurmGangHook",
                "hook-name": "GPU gangs: Slurm",
                "ui-field-behaviour": {
                    "hidden-fields": ["port", "schema"],
                    "relabeling": {"host": "URL", "login": "User", "password": "Token (JWT) or SSH password"},
                    "placeholders": {
                        "host": "https://slurm:6820, ssh://user@login or local",
                        "login": "whose jobs they are",
                    },
                },
                "conn-fields": {
                    "channel": _text(
                        "Channel",
                        "Where gangs put records, logs and checkpoints, as Airflow reaches it: sftp://user@login/shared/gangs, "
                        "a mounted folder, or s3://bucket/prefix, gs://, az:// (credentials: [gpu] store_conn_ids)",
                    ),
                    "job_channel": _text(
                        "Channel on the nodes",
                        "The same folder as the nodes see it. Default: the channel's path",
                    ),
                    "partition": _text("Partition", "One or several, with commas. Default: the cluster's"),
                    "account": _text("Account", "Default: the user's"),
                    "qos": _text("QOS", "Default: the user's"),
                    "gpu_types": {
                        "label": "GPU types",
                        "description": 'Names in DAGs and types in gres.conf: {"H100": "h100"}. Default: in lower case',
                        "schema": {"type": ["object", "null"]},
                    },
                    "exclusive": _flag("Whole nodes", "Each node is the gang's alone"),
                    "requeue": _flag("Requeue", "Slurm starts a preempted gang again by itself"),
                    "grace": _number(
                        "Grace (seconds)", "GraceTime of the QOS or partition that is preempted"
                    ),
                    "python": _text("Python", "Interpreter on the nodes, 3.8 or later. Default: python3"),
                    "key_file": _text(
                        "SSH key file", "For ssh://, token_ssh and sftp://. Default: as ssh has it"
                    ),
                    "host_key": _text("SSH host key", "As in known_hosts. Default: ~/.ssh/known_hosts"),
                    "token_ssh": _text(
                        "Token by SSH",
                        "ssh://user@login, where 'scontrol token' is run. Default: the token above",
                    ),
                },
            },
        ],
        "extra-links": [
            "airflow_gpu.links.gang.LogsLink",
            "airflow_gpu.links.gang.TargetLink",
            "airflow_gpu.links.gang.CheckpointLink",
        ],
        "task-decorators": [{"name": "gang", "class-name": "airflow_gpu.decorators.gang.gang_task"}],
        "config": {
            "gpu": {
                "description": "Gang-scheduled GPU steps",
                "options": {
                    "installation": _option(
                        "Name of this Airflow installation: 1 to 32 of a-z, 0-9 and '-'. Required. It is part of "
                        "every job's identity, so that two Airflows on one cluster never touch each other's jobs.",
                        "prod",
                    ),
                    "state_uri": _option(
                        "Root of the run directories' journals; every worker and triggerer must reach it. "
                        "Default: file://$AIRFLOW_HOME/gangs",
                        "s3://bucket/gangs",
                    ),
                    "state_conn_id": _option(
                        "Connection with the credentials of state_uri, and of its bucket.", "aws_default"
                    ),
                    "store_conn_ids": _option(
                        "Connections with the credentials of object stores that are channels: JSON of URI prefix and "
                        "connection id; the longest prefix counts. Others are opened with the credentials of the "
                        "environment.",
                        '{"s3://gangs": "aws_gangs", "gs://": "google_cloud_default"}',
                    ),
                    "targets": _option(
                        "Connections that a sweep always asks for gangs that were left behind, beside those that "
                        "run directories name: ids with commas.",
                        "slurm_h100,spot_cluster",
                    ),
                    "poll_interval": _option("Seconds between two looks at a target.", "5", "5"),
                },
            }
        },
    }


def _text(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"]}}


def _number(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["integer", "null"]}}


def _flag(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["boolean", "null"]}}


def _option(description: str, example: str, default: str = "") -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": "string",
        "example": example,
        "default": default,
    }
