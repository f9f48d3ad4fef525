"""A DAG with a wrong request: an import error that says what would be right."""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu import Gang, GangOperator


@dag(schedule=None)
def bad_request():
    """Never gets into the list of DAGs."""
    GangOperator(task_id="train", gang=Gang(nodes=0, gpu_per_node=8, command="python train.py"))


bad_request()
