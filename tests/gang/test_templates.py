"""Fields that Airflow still has to render: at parse time they pass, afterwards everything is checked."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.spec import Gang, GangError, Recovery

jinja2 = pytest.importorskip("jinja2")


class XCom:
    """Like Airflow's XComArg: something that is resolved in place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def resolve(self, context: Any) -> Any:
        return self.value


def render(value: Any, **context: Any) -> Any:
    """The rules of Airflow's ``Templater.render_template``; test_airflow_itself runs that one."""
    if isinstance(value, str):
        return jinja2.Environment().from_string(value).render(**context)
    if resolve := getattr(value, "resolve", None):
        return resolve(context)
    if isinstance(value, (list, tuple)):
        return type(value)(render(item, **context) for item in value)
    if isinstance(value, dict):
        return {key: render(item, **context) for key, item in value.items()}
    return value


def through(gang: Gang, **context: Any) -> Gang:
    return Gang.from_fields(render(gang.fields(), **context))


@pytest.mark.parametrize("name", sorted(Gang.model_fields))
@pytest.mark.parametrize("value", ["{{ params.x }}", "{% if x %}1{% endif %}", XCom(1)])
def test_any_field_may_be_a_template(name: str, value: Any) -> None:
    fields = {"command": "x", name: value}
    if name in ("script", "function"):
        del fields["command"]
    gang = Gang(**fields)
    assert getattr(gang, name) is value
    assert gang.templated
    assert gang.fields()[name] is value
    assert copy.deepcopy(gang).templated


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"recovery": {"mode": "{{ m }}"}}, "recovery.mode"),
        ({"recovery": Recovery(preemptions="{{ n }}")}, "recovery.preemptions"),
        ({"placement": {"deadline": XCom("2d")}}, "placement.deadline"),
        ({"checkpointing": {"interval": "{{ i }}"}}, "checkpointing.interval"),
        ({"work": {"hours": "{{ h }}"}}, "work.hours"),
        ({"env": {"A": "{{ a }}", "B": "1"}}, "env.A"),
        ({"secrets": {"A": "conn:{{ a }}#password"}}, "secrets.A"),
        ({"targets": ["a", "{{ t }}"]}, "targets[1]"),
        ({"targets": [XCom("a"), XCom("a")]}, "targets[0], targets[1]"),
        ({"command": ["train", "{{ a }}"]}, "command[1]"),
    ],
)
def test_so_may_what_is_inside(fields: dict[str, Any], expected: str) -> None:
    gang = Gang(**{"command": "x", **fields})
    assert gang.templated
    for record in (gang.to_dict, gang.to_json, gang.digest):
        with pytest.raises(GangError, match=r"^Gang: is not rendered yet: ") as caught:
            record()
        assert str(caught.value).endswith(f": {expected}")


def test_the_rest_is_still_checked() -> None:
    with pytest.raises(GangError) as caught:
        Gang(
            nodes="{{ n }}",
            cpus=0,
            min_nodes=3,
            command=["{{ c }}", None],  # type: ignore[list-item]
            env={"A": "{{ a }}", "B-C": "{{ b }}", "RANK": "{{ r }}"},
            secrets={"T": "{{ t }}", "U": "literal"},
            recovery={"mode": "{{ m }}", "on_clear": "x"},
            targets=["{{ t }}", "a b"],
            nods="{{ n }}",  # type: ignore[call-arg]
        )
    said = [line.removeprefix("Gang: ").split(" ")[0] for line in str(caught.value).splitlines()]
    assert said == [
        "cpus", "command[1]", "env['B-C']", "env.RANK", "secrets.U", "targets[1]", "recovery.on_clear", "unknown"
    ]  # fmt: skip


def test_what_fits_together_is_found_after_rendering() -> None:
    gang = Gang(nodes="{{ n }}", min_nodes=3, gpus_per_node="{{ g }}", ranks_per_node=3, command="x")
    assert through(gang, n=3, g=3).world_size == 9
    with pytest.raises(GangError) as caught:
        through(gang, n=2, g=8)
    assert [line.split(" ")[1] for line in str(caught.value).splitlines()] == ["min_nodes", "ranks_per_node"]
    gang = Gang(command="{{ c }}", script="{{ s }}")
    assert through(gang, c="", s="x").script == "x"
    assert through(gang, c="x", s=None).command == ("x",)
    with pytest.raises(GangError, match="only one of command, script and function"):
        through(gang, c="x", s="x")
    with pytest.raises(GangError, match="command, script or function is required"):
        through(gang, c="", s="")


def test_text_is_taken_for_what_it_stands_for() -> None:
    gang = Gang(
        nodes="{{ n }}",
        accelerator="{{ none }}",
        memory="{{ m }}",
        command="train --name {{ name }}",
        env={"A": "{{ n }}", "B": "{{ none }}"},
        time_limit="{{ t }}",
        work="{{ h }}",
        targets="{{ targets }}",
        min_nodes="{{ '' }}",
        placement={"deadline": "{{ none }}"},
        checkpointing="{{ c | tojson }}",
        recovery={
            "exclude_blamed_nodes": "{{ false }}",
            "preemptions": "{{ none }}",
            "node_failures": "{{ n }}",
        },
    )
    done = through(
        gang, n=2, m="1GiB", t="90m", h=1.5, targets=["a", "b"], c={"interval": None}, name="a b", none=None
    )
    assert done == Gang(
        nodes=2,
        memory="1GiB",
        command=["train", "--name", "a", "b"],
        env={"A": "2", "B": "None"},
        time_limit=5400,
        work=1.5,
        targets=["a", "b"],
        checkpointing={"interval": None},
        recovery={"exclude_blamed_nodes": False, "node_failures": 2},
    )
    assert not done.templated
    assert Gang.from_json(done.to_json()) == done


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("env", "{'A': 'x'}", {"A": "x"}),
        ("env", '{"A": "x"}', {"A": "x"}),
        ("secrets", "{'A': 'var:x'}", {"A": "var:x"}),
        ("targets", "['a', 'b']", ("a", "b")),
        ("targets", '["a"]', ("a",)),
        ("targets", "a, b", ("a", "b")),
        ("command", "['train', 'a b']", ("train", "a b")),
        ("command", "[ -f x ]", ("[", "-f", "x", "]")),
        ("recovery", "{'mode': 'any', 'preemptions': None}", Recovery(mode="any")),
    ],
)
def test_a_printed_list_or_dict(name: str, text: str, expected: Any) -> None:
    assert getattr(Gang.from_fields({"command": "x", name: text}), name) == expected


def test_a_value_with_spaces_stays_one_argument_in_a_list() -> None:
    gang = Gang(command=["train", "--name", "{{ name }}"])
    assert through(gang, name="a b; rm -rf /").command == ("train", "--name", "a b; rm -rf /")


def test_native_rendering() -> None:
    """``render_template_as_native_obj`` makes values of what it can."""
    done = Gang.from_fields(
        {
            "command": ["train", 3, 0.1, True],
            "env": {"A": True, "B": 5},
            "nodes": 2,
            "recovery": {"mode": "any"},
        }
    )
    assert done.command == ("train", "3", "0.1", "True")
    assert done.env == {"A": "True", "B": "5"}


def test_after_rendering_text_is_text() -> None:
    gang = Gang(script="{% raw %}docker ps --format '{{ .Names }}'; echo ${#a[@]}{% endraw %}")
    done = through(gang)
    assert done.script == "docker ps --format '{{ .Names }}'; echo ${#a[@]}"
    assert not done.templated
    assert Gang.from_json(done.to_json()).script == done.script
    with pytest.raises(GangError, match=r"nodes must be a whole number, got '\{\{ n \}\}'"):
        Gang.from_fields({"nodes": "{{ n }}", "command": "x"})
    with pytest.raises(GangError, match="nodes must be a whole number, got a XCom"):
        Gang.from_fields({"nodes": XCom(1), "command": "x"})


def test_fields_are_a_dict() -> None:
    with pytest.raises(GangError, match="Gang: must be a dict of its fields, got a str"):
        Gang.from_fields("nodes")  # type: ignore[arg-type]


def test_fields_that_are_not_rendered_yet() -> None:
    gang = Gang(nodes="{{ n }}", command="x", env={"A": "{{ a }}"}, recovery={"mode": "{{ m }}"})
    again = Gang.from_fields(gang.fields(), rendered=False)
    assert again == gang
    assert again.templated
    assert gang.replace(cpus="{{ c }}").fields()["cpus"] == "{{ c }}"


def test_a_wrong_value_from_a_template_is_named() -> None:
    gang = Gang(nodes="{{ n }}", command="x", secrets={"A": "{{ s }}"})
    with pytest.raises(GangError) as caught:
        through(gang, n="two", s="hunter2")
    assert "nodes must be a whole number, got 'two'" in str(caught.value)
    assert "secrets.A must be a reference" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def train(lr: float, names: Any, gang: Any) -> str:
    return f"{{{{ not a template }}}} {lr} {names}"


def test_arguments_of_a_function_are_rendered_and_its_source_is_not() -> None:
    gang = Gang(function=FunctionSource.of(train, (XCom(0.1),), {"names": ["{{ a }}", XCom(["x"])]}))
    assert gang.templated
    done = through(gang, a="A")
    assert done.function is not None
    assert done.function.call == {"name": "train", "args": [0.1], "kwargs": {"names": ["A", ["x"]]}}
    assert "{{{{ not a template }}}}" in done.function.source
    with pytest.raises(GangError, match=r"argument 'lr' is a set: only JSON values"):
        through(Gang(function=FunctionSource.of(train, (XCom({1}), 2))))
    with pytest.raises(
        GangError, match=r"function has arguments that Airflow has not rendered: kwargs.names\[1\]"
    ):
        Gang.from_fields({"function": gang.fields()["function"] | {"args": [1]}})


def test_paths_are_no_templates() -> None:
    # pathlib's objects have a method "resolve" too; Airflow leaves them alone.
    with pytest.raises(GangError, match="image must be text, got a PosixPath"):
        Gang(command="x", image=pathlib.Path("x"))  # type: ignore[arg-type]
    with pytest.raises(GangError, match="nodes must be a whole number, got a type"):
        Gang(command="x", nodes=XCom)  # type: ignore[arg-type]


PROGRAM = """
import json, sys
from airflow.sdk import DAG, BaseOperator
from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.spec import Gang

def train(lr, names, gang):
    return "{{ stays }}"

class Op(BaseOperator):
    template_fields = ("request",)
    def __init__(self, gang, **kw):
        super().__init__(**kw)
        self.request = gang.fields()

out = {}
for native in (False, True):
    with DAG("d", render_template_as_native_obj=native) as dag:
        first = BaseOperator(task_id="first")
        gang = Gang(
            nodes="{{ params.n }}", accelerator="{{ params.none }}", time_limit=first.output["limit"],
            env={"A": "{{ params.n }}", "B": "{{ params.flag }}"}, targets="{{ params.targets }}",
            function=FunctionSource.of(train, ("{{ params.n }}",), {"names": first.output}),
            recovery={"preemptions": "{{ params.none }}"},
        )
        assert gang.templated
        op = Op(gang=gang, task_id="op")
    assert op.upstream_task_ids == {"first"}, op.upstream_task_ids  # XComArgs inside make the edge
    class TI:
        def xcom_pull(self, *a, **k): return {"limit": "90m"}
    import airflow.sdk.definitions.xcom_arg as xa
    xa.PlainXComArg.resolve = lambda self, context: "90m" if self.key == "limit" else {"limit": "90m"}
    params = {"n": 2, "none": None, "flag": True, "targets": ["a", "b"]}
    op.render_template_fields({"params": params, "ti": TI()})
    out[str(native)] = Gang.from_fields(op.request).to_dict()

from airflow.serialization.helpers import serialize_template_field
one, two = (
    json.dumps(serialize_template_field(Gang(function=FunctionSource.of(train, (1, 2))).fields(), "request"))
    for _ in range(2)
)
assert one == two and " at 0x" not in one and "stays" in one, one
print("OUT" + json.dumps(out))
"""


def test_airflow_itself(tmp_path: pathlib.Path) -> None:
    """Airflow's own renderer and serializer, in a process of its own."""
    pytest.importorskip("airflow")
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    root = str(pathlib.Path(__file__).parents[2])
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.split("OUT")[-1])
    for native, data in out.items():
        gang = Gang.from_dict(data)
        assert gang.function is not None
        assert (gang.nodes, gang.accelerator, gang.time_limit) == (2, None, 5400.0)
        assert gang.env == {"A": "2", "B": "True"}
        assert gang.targets == ("a", "b")
        assert gang.recovery.preemptions is None
        assert gang.function.kwargs == {"names": {"limit": "90m"}}
        assert gang.function.args == ((2,) if native == "True" else ("2",))
        assert "{{ stays }}" in gang.function.source
