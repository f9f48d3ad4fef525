"""A function that cannot travel: an import error that names what is in the way."""

from __future__ import annotations

from airflow.sdk import dag, task

RATE = 0.1


@dag(schedule=None)
def bad_function():
    """Never gets into the list of DAGs."""

    @task.gang(nodes=2)
    def train():
        return RATE

    train()


bad_function()
