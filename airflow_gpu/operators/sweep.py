"""GangSweepOperator: a task that ends gangs which nobody wants any more.

Purpose: the periodic one of the three ways to sweep; the others are
:class:`airflow_gpu.triggers.sweep.GangSweepTrigger` and ``airflow-gpu sweep``.

What it does not do: touch what a task still has, or another installation's
jobs. Two sweeps at once are fine, and one that is killed leaves nothing half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_gpu.compat import AirflowException, BaseOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class GangSweepOperator(BaseOperator):
    """End gangs whose task has ended without them, and jobs whose attempt is over.

    :param targets: connection ids to ask beside those that run directories and
        ``[gpu] targets`` name: a list, or text with commas. (templated)
    :param window: run directories that were touched within this time are
        looked at. What lives longer is found by its target.
    :param lost: also end jobs of this installation that have no run directory.
        Leave it off: if ``[gpu] state_uri`` is wrong, that is every gang.
    :param dry_run: only say what would be done.
    :param fail_on_problems: fail when a person has to look, for example
        because a target did not answer.

    The XCom is the report, as ``airflow-gpu sweep --json`` prints it.

    Example::

        GangSweepOperator(task_id="sweep", targets=["slurm_h100", "spot_cluster"])
    """

    template_fields: Sequence[str] = ("targets",)
    ui_color = "#76b900"
    ui_fgcolor = "#000000"

    def __init__(
        self,
        *,
        targets: str | Sequence[str] | None = None,
        window: timedelta = timedelta(days=14),
        lost: bool = False,
        dry_run: bool = False,
        fail_on_problems: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.targets = targets
        self.window = window
        self.lost = lost
        self.only_look = dry_run  # BaseOperator has a method dry_run()
        self.fail_on_problems = fail_on_problems

    def execute(self, context: Context) -> dict[str, Any]:
        """Sweep once.

        :raises AirflowException: with ``fail_on_problems``, when something is left for a person.
        """
        from airflow_gpu.hooks.sweeping import sweep_here
        from airflow_gpu.sweeping.sweep import Options

        options = Options(dry_run=self.only_look, lost=self.lost, window=self.window.total_seconds())
        report = asyncio.run(sweep_here(self.log.info, targets=self.targets, options=options))
        context["ti"].xcom_push(key="return_value", value=report.json())
        if report.problems and self.fail_on_problems:
            raise AirflowException(
                "something is left that needs a person:\n"
                + "\n".join(f"- {line}" for line in report.problems)
            )
        return report.json()
