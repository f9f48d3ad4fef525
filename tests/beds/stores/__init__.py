"""Object stores that answer as the real ones do, for tests: started on a free port, stopped by pid.

| store | server | why it can be believed |
|---|---|---|
| S3 | versitygw (Go) | checks `If-None-Match` again under a lock a key, right before it publishes |
| Azure Blob | Azurite (npm), Microsoft's own | checks and inserts in one step of one Node process |
| Google Cloud Storage | fake-gcs-server (Go) behind `gcs/main.go` | checks the generation under one lock |

Versions are pinned in `servers.py`; the first use builds them below `~/.cache/airflow-gpu/stores`, with the
ordinary clients of their registries. `wire.py` is a faulty wire to put in front of any of them, `race.py`
the racing writers.
"""
