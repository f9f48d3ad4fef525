"""Tasks that only write down who they are, to find out what Airflow shows a try after each event.

Each start and each resume from a deferral adds a line of JSON to the file
``PROBES``. A task goes on until a file below ``PROBE_GO`` with its name appears; it
fails when that says so.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.triggers.file import FileTrigger
from airflow.sdk import BaseOperator, dag


def go_file(ti) -> Path:
    return Path(os.environ["PROBE_GO"]) / f"{ti.dag_id}.{ti.run_id}.{ti.map_index}.{ti.try_number}"


class Probe(BaseOperator):
    def __init__(self, *, defers: bool, index: int = 0, **kwargs) -> None:
        super().__init__(**kwargs)
        self.defers = defers
        self.index = index

    def tell(self, context, stage: str) -> Path:
        ti, run = context["ti"], context["dag_run"]
        line = {
            "stage": stage,
            "dag_id": ti.dag_id,
            "run_id": ti.run_id,
            "map_index": ti.map_index,
            "ti_id": str(ti.id),
            "try_number": ti.try_number,
            "max_tries": ti.max_tries,
            "clear_number": run.clear_number,
            "run_start": str(run.start_date),
            "run_after": str(run.run_after),
            "run_type": str(run.run_type),
            "ti_start": str(ti.start_date),
            "pid": os.getpid(),
        }
        with open(os.environ["PROBES"], "a") as file:
            file.write(json.dumps(line) + "\n")
        return go_file(ti)

    def execute(self, context):
        go = self.tell(context, "execute")
        if self.defers:
            self.defer(trigger=FileTrigger(str(go), poke_interval=0.5), method_name="resumed")
        while not go.exists():
            time.sleep(0.2)
        self.end(go)

    def resumed(self, context, event=None):
        self.end(self.tell(context, "resume"))

    def end(self, go: Path) -> None:
        if go.read_text() == "fail":
            raise RuntimeError("as told")


def build(name: str, defers: bool, mapped: bool = False, **more):
    @dag(dag_id=name, schedule=None)
    def made():
        if mapped:
            Probe.partial(task_id="probe", defers=defers, **more).expand(index=[0, 1, 2])
        else:
            Probe(task_id="probe", defers=defers, **more)

    made()


again = {"retries": 2, "retry_delay": timedelta(seconds=1)}
build("probe_worker", False, **again)
build("probe_deferred", True, **again)
build("probe_mapped", True, mapped=True, **again)
