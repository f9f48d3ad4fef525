"""Parts of ``benchmarks/triggerer.py``: the gangs, the rows in Airflow's database, and what runs in the triggerer."""
