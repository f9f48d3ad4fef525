"""``@task.gang``: a plain Python function that runs on every rank of a gang.

Purpose: the shortest way from a function to a gang. The function's source
travels (the image needs no DAG file), its arguments travel as JSON, and what
rank 0 returns becomes the task's XCom.

What it does not do: pickle. What cannot travel (a closure, a module global, an
argument that is no JSON) is an error when the DAG is parsed, or, for what an
upstream task gave, before anything is submitted.

Known limits: a result of more than 32 KiB does not fit in XCom; then the XCom
is ``{"result_uri": ...}``. The record of the run (attempts, checkpoint, cost)
is in the XCom ``gang``.

Example::

    @task.gang(nodes=2, gpus_per_node=8, targets="slurm_h100")
    def train(lr: float, gang=None):
        import torch
        ...
        return {"loss": loss}
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from airflow_gpu.compat import AirflowFailException, BaseOperator
from airflow_gpu.gang._explain import ALSO_CALLED
from airflow_gpu.gang.function import HANDLE, FunctionSource
from airflow_gpu.gang.spec import Gang, GangError
from airflow_gpu.operators.gang import GangOperator, _merge

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator


class GangDecoratedOperator(DecoratedOperator, GangOperator):
    """The operator behind ``@task.gang``; its keyword arguments are those of :class:`Gang` and of any task."""

    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *GangOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **GangOperator.template_fields_renderers,
    }
    custom_operator_name = "@task.gang"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("command", "script", "function", "gang"):
            if name in kwargs:
                raise TypeError(f"@task.gang: {name!r} cannot be given, the decorated function is what runs")
        _no_typos(kwargs)
        asked = {name: kwargs.pop(name) for name in list(kwargs) if name in Gang.model_fields}
        named = {key: value for key, value in (op_kwargs or {}).items() if key != HANDLE}
        function = FunctionSource.of(python_callable)
        if not kwargs.get("_airflow_mapped_validation_only"):
            function.bind(tuple(op_args or ()), named)  # what does not fit is told when the DAG is parsed
        if function.wants_handle:
            named[HANDLE] = None  # given on the ranks; Airflow only has to see that it is bound
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=named,
            gang=Gang(function=function, **asked),
            **kwargs,
        )

    def request(self) -> Gang:
        """The gang with the rendered arguments of the call."""
        named = {key: value for key, value in self.op_kwargs.items() if key != HANDLE}
        source = self.gang["function"]["source"]
        try:
            bound = source.bind(tuple(self.op_args), named)
            return Gang.from_fields({**_merge(self.gang, self.overrides or {}), "function": bound})
        except GangError as error:
            raise AirflowFailException(f"after rendering, {error}") from error

    def execute(self, context: Context) -> Any:
        """As :class:`GangOperator`; see :meth:`execute_complete` for the result.

        Parameters named as in Airflow's context (``ds``, ``run_id``, ``params`` ...)
        are filled from it where the value can travel.
        """
        named = dict(self.op_kwargs)
        for name in inspect.signature(self.python_callable).parameters:
            value = context.get(name) if name in KNOWN_CONTEXT_KEYS and named.get(name) is None else None
            if name == "params" and value is not None:
                named[name] = dict(cast("Any", value))
            elif isinstance(value, (str, int, float)):
                named[name] = value
        self.op_kwargs = named
        return GangOperator.execute(self, context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """What rank 0 returned; the record goes to the XCom ``gang``."""
        record = super().execute_complete(context, event)
        if record["result"] is None and record["result_uri"]:
            return self._handle_output({"result_uri": record["result_uri"]})
        return self._handle_output(record["result"])


def _no_typos(kwargs: Mapping[str, Any]) -> None:
    """A misspelt field of the gang is told as such; BaseOperator would only say that it does not know the word.

    :raises GangError: an argument is neither a field nor a task's, and looks like a field.
    """
    of_tasks = inspect.signature(BaseOperator.__init__).parameters
    problems = []
    for name in kwargs:
        if name in Gang.model_fields or name in of_tasks or name.startswith("_"):
            continue
        also = [ALSO_CALLED[name]] if name in ALSO_CALLED else []
        for near in also or difflib.get_close_matches(name, Gang.model_fields, n=1, cutoff=0.75):
            problems.append(f"unknown argument {name!r}; did you mean {near!r}?")
    if problems:
        raise GangError("@task.gang", problems)


def gang_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """``@task.gang``: see the module's docstring.

    :param python_callable: the decorated function.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        decorated_operator_class=GangDecoratedOperator,
        **kwargs,
    )
