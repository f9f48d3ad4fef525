"""``airflow-gpu``: the commands, their options and exit codes. What they do is in modules of their own.

Nothing heavy is imported here: ``airflow-gpu --help`` answers at once, and a
command imports what it needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

from airflow_gpu import __version__
from airflow_gpu.cli.checkpoints import checkpoints
from airflow_gpu.cli.options import placed, run
from airflow_gpu.cli.place import Place

OK, FAILED, USAGE, OPEN = 0, 1, 2, 3
"""Exit codes, see ``docs/commands.md``: done; the command could not do its work; wrong usage; something is left
that a person has to look at."""

CODES = (
    "\b\nExit codes: 0 done; 1 the command could not do its work; 2 wrong usage;\n"
    "3 something could not be found out or ended, a person has to look."
)


class JsonErrors(click.Group):
    """With ``--json`` errors are JSON too."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("standalone_mode", True) is False:
            return super().main(*args, **kwargs)
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption) and error.ctx and error.ctx.command is self:
                after = f"{error.option_name} is no option here; those of a command come after its name"
                error = click.UsageError(f"{after}: airflow-gpu gangs {error.option_name}", error.ctx)
            arguments = kwargs.get("args") or (args[0] if args else None)
            if "--json" in (arguments if arguments is not None else _arguments()):
                click.echo(json.dumps({"ok": False, "error": error.format_message()}))
            else:
                error.show()
            raise SystemExit(error.exit_code) from None
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            raise SystemExit(130) from None
        raise SystemExit(code if isinstance(code, int) else 0)


def _arguments() -> list[str]:
    import sys

    return sys.argv[1:]


@click.group(cls=JsonErrors, context_settings={"help_option_names": ["-h", "--help"]}, epilog=CODES)
@click.version_option(__version__, prog_name="airflow-gpu")
def commands() -> None:
    """See, read, end and check gangs, also while Airflow is down.

    The commands work from the run directories and the targets. Settings are those
    of Airflow: AIRFLOW__GPU__INSTALLATION, AIRFLOW__GPU__STATE_URI, or [gpu] in
    airflow.cfg. Connections come from --connections, AIRFLOW_CONN_<ID>, or Airflow.
    """


def asking(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say who asks Airflow; the function gets ``asks``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--airflow-url",
            help="Ask Airflow through its REST API, with AIRFLOW_GPU_TOKEN, or AIRFLOW_GPU_USER and "
            "AIRFLOW_GPU_PASSWORD.",
        )
        @click.option(
            "--ask/--without-airflow",
            "ask",
            default=default == "ask",
            help=f"Ask Airflow what became of the tasks, in its database unless there is an --airflow-url. "
            f"Default: {'--ask' if default == 'ask' else '--without-airflow'}.",
        )
        @functools.wraps(function)
        def wrapped(airflow_url: str | None, ask: bool, **more: Any) -> Any:
            return function(asks=_asks(airflow_url, ask), **more)

        return wrapped

    return decorate


def _asks(url: str | None, ask: bool) -> Any:
    from airflow_gpu.sweeping.airflow import Nobody

    if url:
        from airflow_gpu.hooks.asking import RestAirflow

        return RestAirflow(url)
    if ask:
        from airflow_gpu.hooks.asking import DatabaseAirflow

        return DatabaseAirflow()
    return Nobody()


@commands.command(
    epilog="\b\nExamples:\n  airflow-gpu gangs\n  airflow-gpu gangs --all --days 30\n  airflow-gpu gangs --ask --json"
)
@click.option("--all", "every", is_flag=True, help="Also those that are over.")
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=14,
    show_default=True,
    help="Leave out run directories that were not touched for so long, unless something of them runs. 0: none.",
)
@asking("without")
@placed
def gangs(place: Place, asks: Any, every: bool, days: float, as_json: bool) -> int:
    """List the gangs that live, by run directories and targets.

    With --ask, those that no task wants any more are marked.
    """
    from airflow_gpu.cli.gangs import list_gangs

    return run(list_gangs(place, asks, every=every, days=days, as_json=as_json))


@commands.command(
    epilog="\b\nExamples:\n  airflow-gpu logs train_model/manual__2026-03-01/fit\n  airflow-gpu logs train_model --rank 3 --follow\n  airflow-gpu logs train-fit-hpyf6g52kao7-2 --node 1"
)
@click.argument("run_name", metavar="RUN")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose output.")
@click.option("--life", type=click.IntRange(min=1), help="Of which start of the ranks. Default: the newest.")
@click.option(
    "--follow", "-f", is_flag=True, help="Go on until the gang is over, through its next lives too."
)
@click.option("--node", type=click.IntRange(min=0), help="Instead: the platform's own output of a node.")
@placed
def logs(
    place: Place, run_name: str, rank: int, life: int | None, follow: bool, node: int | None, as_json: bool
) -> int:
    """Print the output of a rank.

    RUN is dag/run/task, dag/run/task[map], the beginning of it, the name of a job,
    or the path of a run directory.
    """
    from airflow_gpu.cli.logs import print_logs

    return run(print_logs(place, run_name, rank=rank, life=life, follow=follow, node=node, as_json=as_json))


@commands.command(
    epilog="\b\nExamples:\n  airflow-gpu cancel train_model/manual__2026-03-01/fit\n  airflow-gpu cancel train_model --grace 5"
)
@click.argument("run_name", metavar="RUN")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    help="Seconds from the notice to the kill; at most stop_grace of the gang, which is the default.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=900,
    show_default=True,
    help="Longest wait for the end, in seconds beyond the grace.",
)
@placed
def cancel(place: Place, run_name: str, grace: float | None, wait: float, as_json: bool) -> int:
    """End a gang, with a notice so that it saves, and wait until it is over.

    It is journalled as a stop by the run's owner, so an Airflow task that waits for
    it ends as cancelled. If the task has retries left, Airflow tries again and goes
    on from the checkpoint: mark it as failed there to keep it from that.
    """
    from airflow_gpu.cli.cancel import cancel_gang

    return run(cancel_gang(place, run_name, grace=grace, wait=wait, as_json=as_json))


@commands.command(
    epilog="\b\nExamples:\n  airflow-gpu sweep --dry-run\n  airflow-gpu sweep --airflow-url https://airflow.example.com\n  airflow-gpu sweep --without-airflow\n  airflow-gpu sweep --lost --targets slurm_h100"
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--lost",
    is_flag=True,
    help="Also end jobs of this installation that have no run directory. With a wrong state_uri that is every gang.",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=14,
    show_default=True,
    help="Leave out run directories that were not touched for so long, unless something of them runs. 0: none.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=600,
    show_default=True,
    help="Longest wait for the end of one gang, in seconds beyond its grace.",
)
@asking("ask")
@placed
def sweep(place: Place, asks: Any, dry_run: bool, lost: bool, days: float, wait: float, as_json: bool) -> int:
    """End gangs that nobody wants any more, and say what could not be found out.

    A gang is ended when its task has ended in Airflow without it, or is not there
    any more; a job also when its attempt is over. Without Airflow only the latter.
    """
    from airflow_gpu.cli.sweep import sweep_now

    return run(sweep_now(place, asks, dry_run=dry_run, lost=lost, days=days, wait=wait, as_json=as_json))


@commands.command(
    epilog="\b\nExamples:\n  airflow-gpu doctor\n  airflow-gpu doctor slurm_h100 --job\n  airflow-gpu doctor slurm_h100 --job --secret AWS_ACCESS_KEY_ID=conn:minio#login --secret AWS_SECRET_ACCESS_KEY=conn:minio#password\n  airflow-gpu doctor --json"
)
@click.argument("names", metavar="[TARGET]...", nargs=-1)
@click.option(
    "--job", is_flag=True, help="Also run a gang of one node on each target, without GPUs where it can."
)
@click.option(
    "--wait",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    help="Longest wait for that job, in seconds.",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME=REFERENCE",
    help="Environment of that job, as in Gang(secrets=...): NAME=conn:ID#password (or #login, #host, #extra.KEY) or "
    "NAME=var:KEY. May be given several times; values are shown nowhere.",
)
@placed
def doctor(
    place: Place, names: tuple[str, ...], job: bool, wait: float, secrets: tuple[str, ...], as_json: bool
) -> int:
    """Check settings, state store, connections, targets and channels.

    TARGET is the id of a connection; without any, all that options, [gpu] targets,
    the file of connections and the environment name. Stores are proven by writing
    a few small files, which are removed. With --job, a gang of one node says what
    its side sees: whether it can write to the channel, its Python, its clock.
    """
    from airflow_gpu.cli.doctor import examine
    from airflow_gpu.cli.inside import references

    if secrets and not job:
        raise click.UsageError("--secret is for the job: give --job as well")
    given = references(secrets)
    return run(examine(place, list(names), job=job, wait=wait, secrets=given, as_json=as_json))


commands.add_command(checkpoints)
