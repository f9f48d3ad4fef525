"""``python -m airflow_gpu.cli``, where the command itself is not on the path."""

from airflow_gpu.cli import main

main()
