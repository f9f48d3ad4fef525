"""What this package costs a DAG file, beside one with a bare ``airflow.sdk`` operator, in one run.

``import airflow_gpu`` on top of the interpreter, and a DAG file with a
``GangOperator`` on top of the same file with a ``BaseOperator``. Each figure is
the median of fresh interpreters, taken in turn so that a busy machine slows
both alike. Importing ``airflow.sdk`` takes seconds and varies by more than what
is asked here, so the files are timed by the child itself, once that is loaded.

    python benchmarks/parse.py [rounds]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BARE = """
from airflow.sdk import DAG, BaseOperator
with DAG("bare", schedule=None):
    BaseOperator(task_id="train")
"""
GANG = """
from airflow.sdk import DAG
from airflow_gpu import Gang, GangOperator
with DAG("gang", schedule=None):
    GangOperator(task_id="train", gang=Gang(nodes=8, gpus_per_node=8, command="python train.py"))
"""
CASES = {
    "an empty file": "pass",
    "import airflow_gpu": "import airflow_gpu",
    "DAG file, bare airflow.sdk operator": BARE,
    "DAG file, GangOperator": GANG,
}


CHILD = """
import sys, time
source = open(sys.argv[1]).read()
if "airflow.sdk" in source:
    from airflow.sdk import DAG, BaseOperator
    with DAG("warm", schedule=None):  # what the first DAG of a process costs, whatever is in it
        BaseOperator(task_id="warm")
start = time.perf_counter()
exec(compile(source, sys.argv[1], "exec"), {"__name__": "dag_file"})
print("took", time.perf_counter() - start)
"""


def once(path: Path) -> float:
    """Milliseconds for the file, in an interpreter of its own."""
    out = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    return float(out.rsplit("took", 1)[1]) * 1000


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for number, (name, source) in enumerate(CASES.items()):
            paths[name] = Path(folder) / f"case_{number}.py"
            paths[name].write_text(source)
        times: dict[str, list[float]] = {name: [] for name in CASES}
        for round_ in range(rounds + 1):
            for name, path in paths.items():
                took = once(path)
                if round_:  # the first round warms the caches
                    times[name].append(took)
    medians = {name: statistics.median(took) for name, took in times.items()}
    for name, took in medians.items():
        print(f"{name:<40} {took:8.1f} ms")
    names = list(CASES)
    print(f"\nimport airflow_gpu, on top of the interpreter: {medians[names[1]] - medians[names[0]]:.1f} ms")
    print(f"GangOperator, on top of a bare operator:       {medians[names[3]] - medians[names[2]]:.1f} ms")


if __name__ == "__main__":
    main()
