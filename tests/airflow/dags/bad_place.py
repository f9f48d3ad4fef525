"""A DAG that hands a field of the gang to the operator: an import error that says where it belongs."""

from __future__ import annotations

from airflow.sdk import dag

from airflow_gpu import GangOperator


@dag(schedule=None)
def bad_place():
    """Never gets into the list of DAGs."""
    GangOperator(task_id="train", nodes=2, command="python train.py")


bad_place()
