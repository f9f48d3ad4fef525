"""``airflow-gpu checkpoints list | verify | prune | copy``: the commands. What they do is in :mod:`.checkpointed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from airflow_gpu.cli.options import placed, run
from airflow_gpu.cli.place import Place


@click.group()
def checkpoints() -> None:
    """See, check, let go of and copy the checkpoints of a gang.

    RUN is dag/run/task, dag/run/task[map], the beginning of it, the name of a job,
    or the path of a run directory.
    """


def _chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--life", type=click.IntRange(min=1), help="Of this life."),
        click.option(
            "--step",
            type=click.IntRange(min=0),
            help="Of this step. Default: the one that a next life would start from.",
        ),
    ):
        function = option(function)
    return function


@checkpoints.command("list", epilog="\b\nExample:\n  airflow-gpu checkpoints list train_model")
@click.argument("run_name", metavar="RUN")
@placed
def list_(place: Place, run_name: str, as_json: bool) -> int:
    """List all that there are, with what each is and which one counts."""
    from airflow_gpu.cli.checkpointed import list_checkpoints

    return run(list_checkpoints(place, run_name, as_json=as_json))


@checkpoints.command(
    epilog="\b\nExamples:\n  airflow-gpu checkpoints verify train_model\n  airflow-gpu checkpoints verify train_model --all --mark"
)
@click.argument("run_name", metavar="RUN")
@_chosen
@click.option("--all", "every", is_flag=True, help="All that have a manifest.")
@click.option("--mark", is_flag=True, help="Mark what is damaged, so that no life takes it.")
@click.option("--parallel", type=click.IntRange(1, 32), default=8, show_default=True, help="Files at once.")
@placed
def verify(
    place: Place,
    run_name: str,
    step: int | None,
    life: int | None,
    every: bool,
    mark: bool,
    parallel: int,
    as_json: bool,
) -> int:
    """Compare size and SHA-256 of every file with the manifest.

    Exit code 3 when something is not as it was saved.
    """
    from airflow_gpu.cli.checkpointed import Choice, verify_checkpoints

    choice = Choice(step, life, every)
    return run(verify_checkpoints(place, run_name, choice, mark=mark, parallel=parallel, as_json=as_json))


@checkpoints.command(
    epilog="\b\nExamples:\n  airflow-gpu checkpoints prune train_model --keep 3 --dry-run\n  airflow-gpu checkpoints prune train_model --keep 1 --every 10000 --yes"
)
@click.argument("run_name", metavar="RUN")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many stay, the newest.")
@click.option("--every", type=click.IntRange(min=1), help="Steps that are a multiple of it stay as well.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--trust", is_flag=True, help="Do not hash the one that a next life would start from first.")
@placed
def prune(
    place: Place,
    run_name: str,
    keep: int,
    every: int | None,
    dry_run: bool,
    yes: bool,
    trust: bool,
    as_json: bool,
) -> int:
    """Remove checkpoints that no later life can need. May be run while the gang runs."""
    from airflow_gpu.cli.checkpointed import prune_checkpoints

    if as_json and not (yes or dry_run):
        raise click.UsageError("--json asks nobody: give --yes or --dry-run")
    return run(
        prune_checkpoints(
            place, run_name, keep, every, dry_run=dry_run, yes=yes, trust=trust, as_json=as_json
        )
    )


@checkpoints.command(
    epilog="\b\nExamples:\n  airflow-gpu checkpoints copy train_model s3://models/keep\n  airflow-gpu checkpoints copy train_model slurm_h100 --step 20000"
)
@click.argument("run_name", metavar="RUN")
@click.argument("to", metavar="TO")
@_chosen
@click.option("--parallel", type=click.IntRange(1, 32), default=8, show_default=True, help="Files at once.")
@placed
def copy(
    place: Place,
    run_name: str,
    to: str,
    step: int | None,
    life: int | None,
    parallel: int,
    as_json: bool,
) -> int:
    """Copy one to another store, verified; what is there already is not sent again.

    TO is the address of a store (s3://, gs://, az://, sftp://, file:// or a folder), or the id
    of a connection: the channel of that target. The path below it is the same.
    """
    from airflow_gpu.cli.checkpointed import Choice, copy_checkpoint

    return run(copy_checkpoint(place, run_name, to, Choice(step, life), parallel=parallel, as_json=as_json))
