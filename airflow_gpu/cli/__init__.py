"""``airflow-gpu``: gangs from a shell, also when Airflow is down."""

from __future__ import annotations


def main() -> None:
    """The entry point."""
    from airflow_gpu.cli.main import commands

    commands()
