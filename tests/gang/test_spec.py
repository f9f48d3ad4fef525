from __future__ import annotations

import ast
import copy
import json
import pathlib
import pickle
import traceback
import warnings
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_gpu.gang.spec import (
    RESERVED_ENV,
    Checkpointing,
    Gang,
    GangError,
    GangWarning,
    Placement,
    Recovery,
    Work,
)

from .strategies import GANGS, JSON, arguments

slow = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)


def problems(**fields: Any) -> list[str]:
    """What is said of ``Gang(...)``, with a command unless one is given."""
    fields.setdefault("command", "true")
    with pytest.raises(GangError) as caught:
        Gang(**fields)
    return [line.removeprefix("Gang: ") for line in str(caught.value).splitlines()]


# --- what is taken -----------------------------------------------------------------


def test_defaults() -> None:
    gang = Gang(command="train")
    assert (gang.nodes, gang.gpus_per_node, gang.ranks_per_node, gang.min_nodes) == (1, 1, None, None)
    assert (gang.launch, gang.targets, gang.priority, gang.env, gang.secrets) == (
        "rank",
        ("gpu_default",),
        0,
        {},
        {},
    )
    assert (gang.time_limit, gang.barrier_timeout, gang.stop_grace) == (86400.0, 300.0, 30.0)
    assert gang.placement == Placement(max_wait="7d", start_timeout="30m", deadline=None)
    assert gang.checkpointing == Checkpointing(interval="auto", keep=3)
    assert gang.recovery == Recovery(
        preemptions=None,
        node_failures=3,
        out_of_memory=0,
        application=0,
        mode="infra",
        on_clear="resume",
        exclude_blamed_nodes=True,
        fruitless=10,
        unknown_limit="1h",
        backoff=10,
        backoff_max="10m",
    )


def test_what_an_author_writes() -> None:
    gang = Gang(
        nodes=8,
        gpus_per_node=8,
        accelerator=" H100 ",
        memory="64GiB",
        command="python train.py --name 'a b' --lr 0.1",
        launch="node",
        env={"OMP_NUM_THREADS": 8, "RATE": 0.5, "EMPTY": ""},
        secrets={"HF_TOKEN": "conn:hf#password", "KEY": "var:wandb/key", "X": "conn:a.b-c#extra.key.id"},
        time_limit=timedelta(hours=1),
        work=40,
        targets=["slurm_a", "eks"],
        placement={"deadline": "2d"},
        checkpointing=Checkpointing(interval=None),
        recovery={"mode": "any", "preemptions": 5},
    )
    assert gang.accelerator == "H100"
    assert gang.memory == 64 * 2**30
    assert gang.command == ("python", "train.py", "--name", "a b", "--lr", "0.1")
    assert gang.env == {"OMP_NUM_THREADS": "8", "RATE": "0.5", "EMPTY": ""}
    assert gang.time_limit == 3600.0
    assert gang.work == Work(hours=40)
    assert gang.targets == ("slurm_a", "eks")
    assert gang.placement.deadline == 172800.0
    assert gang.checkpointing.interval is None
    assert gang.recovery.preemptions == 5
    assert (gang.ranks, gang.world_size, gang.gpus) == (8, 64, 64)


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [(8, None, 8), (0, None, 1), (0, 5, 5), (8, 8, 8), (8, 16, 16), (8, 2, 2), (1, 3, 3)],
)
def test_ranks(gpus: int, ranks: int | None, expected: int) -> None:
    gang = Gang(command="x", nodes=2, gpus_per_node=gpus, ranks_per_node=ranks)
    assert (gang.ranks, gang.world_size) == (expected, 2 * expected)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("a", ("a",)), ("a, b", ("a", "b")), (["b", "a"], ("b", "a")), (("a",), ("a",))],
)
def test_targets(written: Any, expected: tuple[str, ...]) -> None:
    assert Gang(command="x", targets=written).targets == expected


@pytest.mark.parametrize("written", ["a, b,a", ["a", "a"], [" a", "b", "a "]])
def test_a_target_is_named_once(written: Any) -> None:
    [line] = problems(targets=written)
    assert line.startswith("targets must name each connection once, and 'a' is there twice")


def test_copies_need_a_folder() -> None:
    """``local=""`` is a variable that was not set, and would be a gang without copies."""
    [line] = problems(checkpointing={"local": ""})
    assert line.startswith("checkpointing.local must be the absolute path of a folder")
    assert Gang.from_fields({"command": "x", "checkpointing": {"local": ""}}).checkpointing.local is None
    [line] = problems(checkpointing={"local_interval": 30})
    assert line.startswith("checkpointing.local_interval needs local")


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        (
            {"interval": "2m", "local_interval": "2m"},
            "(120 s), or every save would go to the channel, got 120 s",
        ),
        (
            {"interval": 90, "local_interval": 100.0},
            "(90 s), or every save would go to the channel, got 100 s",
        ),
        ({"interval": "1m"}, "(60 s), or every save would go to the channel, got 120 s, its default"),
    ],
)
def test_copies_are_more_frequent_than_saves(fields: dict[str, Any], got: str) -> None:
    [line] = problems(checkpointing={"local": "/local/ckpt", **fields})
    assert line.startswith(f"checkpointing.local_interval must be less than interval {got}")
    recorded = Gang(command="x", checkpointing={"local": "/local/ckpt"}).to_dict()
    recorded["checkpointing"] |= {"interval": 60.0, "local_interval": 120.0}
    assert Gang.from_json(json.dumps(recorded)).checkpointing.interval == 60.0, "a gang that runs goes on"


@pytest.mark.parametrize("interval", ["auto", None, "{{ params.every }}", 121])
def test_copies_beside_any_other_interval(interval: Any) -> None:
    assert Checkpointing(interval=interval, local="/local/ckpt").local_interval == 120.0


def test_numbers_in_a_command_are_written_out() -> None:
    assert Gang(command=["train", "--n", 8, "--lr", 0.1, ""]).command == (
        "train",
        "--n",
        "8",
        "--lr",
        "0.1",
        "",
    )


def test_empty_text_is_not_given() -> None:
    gang = Gang(command="x", accelerator="", script="", team=" ", min_nodes="", work="", function="")  # type: ignore[arg-type]
    assert gang == Gang(command="x")


def test_frozen() -> None:
    gang = Gang(command="x")
    with pytest.raises(ValueError, match="frozen"):
        gang.nodes = 2
    with pytest.raises(ValueError, match="frozen"):
        gang.recovery.mode = "any"


def test_copies_are_equal() -> None:
    gang = Gang(command="x", env={"A": "1"}, recovery={"mode": "any"})
    assert copy.copy(gang) == copy.deepcopy(gang) == pickle.loads(pickle.dumps(gang)) == gang
    assert hash(copy.deepcopy(gang)) == hash(gang)
    assert gang != gang.replace(nodes=2)
    assert gang != "gang"


def test_replace_checks_again() -> None:
    gang = Gang(command="x", nodes=4, min_nodes=3, time_limit="2h")
    assert gang.replace(nodes=5, time_limit="1h") == Gang(command="x", nodes=5, min_nodes=3, time_limit="1h")
    with pytest.raises(GangError, match="min_nodes must be at most nodes"):
        gang.replace(nodes=2)
    final = Gang.from_json(gang.to_json())
    assert final.replace(team="{{ not a template }}").team == "{{ not a template }}"
    assert not final.replace(nodes=9).templated


# --- what is refused ---------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("nodes", 0, "nodes must be at least 1, got 0"),
    ("nodes", True, "nodes must be a number, got True"),
    ("nodes", 1.5, "nodes must be a whole number, got 1.5"),
    ("nodes", "two", "nodes must be a whole number, got 'two'"),
    ("nodes", None, "nodes must be a whole number, got None"),
    ("nodes", "", "nodes must be a whole number, got ''"),
    ("nodes", 10**6, "nodes must be at most 100000, got 1000000"),
    ("nodes", [2], "nodes must be a whole number, got [2]"),
    ("gpus_per_node", -1, "gpus_per_node must be at least 0, got -1"),
    ("ranks_per_node", 0, "ranks_per_node must be at least 1, got 0"),
    ("accelerator", 4090, "accelerator must be text, got 4090"),
    ("accelerator", "a\nb", "accelerator must be one line of text, got 'a\\nb'"),
    ("cpus", 0, "cpus must be at least 1, got 0"),
    ("memory", "much", 'memory must be bytes or text such as "64GiB" (2**30 each) or "64GB" (10**9 each), got \'much\''),
    ("memory", "64G", "memory is ambiguous, Kubernetes and Slurm read a bare G differently: write 64GiB or 64GB, got '64G'"),
    ("memory", 64, 'memory must be at least 1 MiB: a number alone is bytes, "64GiB" has its unit, got 64'),
    ("image", b"x", "image must be text, got a bytes"),
    ("command", "echo 'a", "command must be a line that a shell can split (no closing quotation): check its quotes, got \"echo 'a\""),
    ("command", [], "command must start with the program to run, got []"),
    ("command", ["", "x"], "command must start with the program to run, got ['', 'x']"),
    ("command", ["x", None], "command[1] must be text, got None"),
    ("command", ["x", True], 'command[1] must be text: write "1", "true" or "True", as the program reads it, got True'),
    ("command", ["x", "a\0"], "command[1] must not contain a NUL character, got 'a\\x00'"),
    ("command", 5, "command must be a list of texts, or one text that is split as a shell does, got 5"),
    ("script", "a\0", "script must not contain a NUL character, got 'a\\x00'"),
    ("script", 5, "script must be text, got 5"),
    ("function", 5, "function must be a function, got 5"),
    ("launch", "ranks", "launch must be one of 'rank', 'node' or 'head' (did you mean 'rank'?), got 'ranks'"),
    ("env", {"RANK": "1"}, "env.RANK is set by the runtime on every rank: choose another name, got 'RANK'"),
    ("env", {"GANG_X": "1"}, "env.GANG_X is set by the runtime on every rank: choose another name, got 'GANG_X'"),
    ("env", {"A-B": "1"}, "env['A-B'] must be a name of letters, digits and _, not starting with a digit, got 'A-B'"),
    ("env", {"A": None}, "env.A must be text, got None"),
    ("env", {"A": True}, 'env.A must be text: write "1", "true" or "True", as the program reads it, got True'),
    ("env", {"A": ["x"]}, "env.A must be text"),
    ("env", ["A=1"], "env must be a dict"),
    ("secrets", {"MASTER_ADDR": "var:x"}, "secrets.MASTER_ADDR is set by the runtime on every rank: choose another name"),
    ("time_limit", 0, "time_limit must be more than 0, got 0"),
    ("time_limit", "soon", 'time_limit must be a duration: seconds, a timedelta, or text such as "90m", "1h30m" or "2d", got \'soon\''),
    ("time_limit", None, 'time_limit must be a duration: seconds, a timedelta, or text such as "90m", "1h30m" or "2d", got None'),
    ("barrier_timeout", -1, "barrier_timeout must not be negative, got -1"),
    ("stop_grace", "4000d", "stop_grace must be at most 3650 days: every wait is bounded, got '4000d'"),
    ("work", 0, "work.hours must be more than 0, got 0"),
    ("work", float("inf"), "work.hours must be a finite number, got inf"),
    ("work", True, "work.hours must be a number, got True"),
    ("work", {"accelerator": "H100"}, "work.hours is required"),
    ("work", {"hour": 1, "hours": 1}, "unknown argument 'work.hour'; did you mean 'work.hours'?"),
    ("priority", "high", "priority must be a whole number, got 'high'"),
    ("backfill_priority", "low", "backfill_priority must be a whole number, got 'low'"),
    ("recovery", {"unreachable": "move"}, "recovery.unreachable='move' needs another target to move to: list two or more in targets"),
    ("recovery", {"unreachable": "stay"}, "recovery.unreachable must be one of 'wait' or 'move', got 'stay'"),
    ("checkpointing", {"on_change": "never"}, "checkpointing.on_change must be one of 'fresh' or 'resume', got 'never'"),
    ("placement", {"move_after": "soon"}, ""),
    ("min_nodes", 0, "min_nodes must be at least 1, got 0"),
    ("min_nodes", 2, "min_nodes must be at most nodes (1), got 2"),
    ("topology", ["x"], "topology must be text, got ['x']"),
    ("targets", [], 'targets must name at least one connection, such as "gpu_default", got []'),
    ("targets", {"a"}, "targets must be a list: its order counts, got a set"),
    ("targets", ["a b"], "targets[0] must be an Airflow connection id, got 'a b'"),
    ("targets", None, "targets must be a connection id or a list of them, got None"),
    ("placement", {"max_wait": None}, 'placement.max_wait must be a duration: seconds, a timedelta, or text such as "90m", "1h30m" or "2d", got None'),
    ("placement", {"start_timeout": 0}, "placement.start_timeout must be more than 0, got 0"),
    ("placement", {"dead_line": 1}, "unknown argument 'placement.dead_line'; did you mean 'placement.deadline'?"),
    ("placement", 3, "placement must be a Placement or a dict, got 3"),
    ("checkpointing", {"keep": 0}, "checkpointing.keep must be at least 1, got 0"),
    ("checkpointing", {"every": 0}, "checkpointing.every must be at least 1, got 0"),
    ("checkpointing", None, "checkpointing must be a Checkpointing or a dict, got None"),
    ("recovery", {"mode": "all"}, "recovery.mode must be one of 'infra', 'any' or 'never', got 'all'"),
    ("recovery", {"on_clear": "resum"}, "recovery.on_clear must be one of 'resume' or 'fresh' (did you mean 'resume'?), got 'resum'"),
    ("recovery", {"exclude_blamed_nodes": "maybe"}, "recovery.exclude_blamed_nodes must be True or False, got 'maybe'"),
    ("recovery", {"application": None}, "recovery.application must be a whole number, got None"),
    ("recovery", {"fruitless": 0}, "recovery.fruitless must be at least 1, got 0"),
    ("recovery", {"backoff": 900}, "recovery.backoff_max must be at least backoff (900 s), got 600 s"),
    ("recovery", Placement(), "recovery must be a Recovery or a dict, got a Placement"),
    ("team", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), [case for case in WRONG if case[2]])
def test_each_wrong_field_alone(name: str, value: Any, expected: str) -> None:
    if name in ("script", "function"):
        assert problems(**{name: value}, command=None) == [expected]
    else:
        assert problems(**{name: value}) == [expected]


def test_every_field_is_among_them() -> None:
    assert {name for name, _, _ in WRONG} == set(Gang.model_fields)


def test_all_wrong_fields_are_named_at_once() -> None:
    assert problems(
        nodes=2, min_nodes=3, cpus="x", gpu_per_node=1, command=None, recovery={"mode": "x", "backoff": 9999}, env={"9": 1}
    ) == [
        "cpus must be a whole number, got 'x'",
        "env['9'] must be a name of letters, digits and _, not starting with a digit, got '9'",
        "recovery.mode must be one of 'infra', 'any' or 'never', got 'x'",
        "unknown argument 'gpu_per_node'; did you mean 'gpus_per_node'?",
        "command, script or function is required: what is the gang to run?",
        "min_nodes must be at most nodes (2), got 3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu_per_node", "did you mean 'gpus_per_node'?"),
        ("node", "did you mean 'nodes'?"),
        ("gpus", "did you mean 'gpus_per_node'?"),
        ("timeout", "did you mean 'time_limit'?"),
        ("retries", "did you mean 'recovery'?"),
        ("conn_id", "did you mean 'targets'?"),
        ("environment", "did you mean 'env'?"),
        ("max_wait", "it belongs in placement=Placement(max_wait=...)"),
        ("preemptions", "it belongs in recovery=Recovery(preemptions=...)"),
        ("keep", "it belongs in checkpointing=Checkpointing(keep=...)"),
        ("xyzzy", f"there are {', '.join(Gang.model_fields)}"),
    ],
)
def test_unknown_arguments(name: str, expected: str) -> None:
    assert problems(**{name: "secret-value"}) == [f"unknown argument '{name}'; {expected}"]


def test_the_program_is_given_once() -> None:
    required = "command, script or function is required: what is the gang to run?"
    assert problems(command=None) == [required]
    assert problems(command="", script=" ") == [required]
    assert problems(script="x") == [
        "only one of command, script and function can be given, got command and script"
    ]
    assert problems(command=[], script="x") == [
        "command must start with the program to run, got []",
        "only one of command, script and function can be given, got command and script",
    ]


def train() -> None:
    pass


def test_what_does_not_fit_together() -> None:
    assert problems(gpus_per_node=8, ranks_per_node=3) == [
        "ranks_per_node must be a multiple of gpus_per_node (8) or divide it, "
        "so that all ranks have the same share, got 3"
    ]
    assert problems(command=None, function=train, launch="head") == [
        "launch must be 'rank' for a function: it runs on every rank, got 'head'"
    ]
    assert problems(env={"A": "1", "B": "2"}, secrets={"B": "var:b"}) == [
        "env.B is in secrets too: give it once"
    ]


def test_parts_by_themselves() -> None:
    with pytest.raises(
        GangError, match=r"^Recovery: mode must be one of 'infra', 'any' or 'never', got 'x'$"
    ):
        Recovery(mode="x")
    with pytest.raises(GangError, match=r"^Recovery: unknown argument 'modes'; did you mean 'mode'\?$"):
        Recovery(modes="x")  # type: ignore[call-arg]
    with pytest.raises(GangError, match=r"^Gang: takes keyword arguments only$"):
        Gang(2)  # type: ignore[misc]
    with pytest.raises(GangError, match=r"^Work: hours is required$"):
        Work()  # type: ignore[call-arg]


# --- secrets -----------------------------------------------------------------------

LITERAL = "hunter2-hunter2"


@pytest.mark.parametrize(
    "fields",
    [
        {"secrets": {"HF_TOKEN": LITERAL}},
        {"secrets": {"HF_TOKEN": f"conn:{LITERAL}"}},
        {"secrets": {"HF_TOKEN": f"conn:hf#{LITERAL}"}},
        {"secrets": {"HF_TOKEN": [LITERAL]}},
        {"secrets": LITERAL},
        {"secrets": [LITERAL]},
        {"secrets": {"HF_TOKEN": f"var:{LITERAL} "}},
        {"env": {"HF_TOKEN": [LITERAL]}},
        {"env": {"X": {"a": LITERAL}}},
        {"env": [f"HF_TOKEN={LITERAL}"]},
        {"hf_token": LITERAL},
        {"recovery": {"password": LITERAL}},
    ],
)
def test_a_literal_secret_is_refused_and_never_shown(fields: dict[str, Any]) -> None:
    try:
        Gang(command="x", nodes=0, **fields)
    except GangError as error:
        # Also not in what a traceback with its causes and contexts prints.
        told = "".join(traceback.format_exception(error))
        assert error.__context__ is None
    assert LITERAL not in told
    assert "nodes must be at least 1, got 0" in told


def test_what_a_secret_should_look_like() -> None:
    right = '"conn:<connection id>#password" (or #login, #host, #extra.<key>) or "var:<variable>"'
    assert problems(secrets={"T": "abc"}) == [
        f"secrets.T must be a reference, {right}, never the secret itself (what was given is not shown)"
    ]
    assert problems(secrets={"T": "conn:hf"}) == [f"secrets.T must name a field of the connection: {right}"]


def test_values_that_look_like_secrets_are_warned_of() -> None:
    with pytest.warns(GangWarning, match=r'env.HF_TOKEN looks like a secret.*secrets=\{"HF_TOKEN"') as caught:
        Gang(command="x", env={"HF_TOKEN": LITERAL})
    assert caught[0].filename == __file__  # it points at the DAG file
    assert LITERAL not in str(caught[0].message)
    for name in ("DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "OPENAI_API_KEY", "api_key"):
        with pytest.warns(GangWarning, match=name):
            Gang(command="x", env={name: "abc"})
    with pytest.warns(
        GangWarning, match=r"env.X would record a connection's secret in plain text; use secrets"
    ):
        Gang(command="x", env={"X": "{{ conn.hf.password }}"})
    with pytest.warns(GangWarning, match=r"command would record a connection's secret"):
        Gang(command="train --token {{ conn.hf.extra_dejson.token }}")


def test_harmless_names_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gang(
            command="x {{ conn.hf.host }}",
            env={
                "TOKENIZERS_PARALLELISM": "false",
                "MAX_TOKEN": "512",
                "HF_TOKEN": "",
                "KEYS": "a",
                "MONKEY": "b",
            },
        )


def test_a_comment_of_jinja_is_warned_of() -> None:
    with pytest.warns(GangWarning, match="script has '{#', where Jinja begins a comment"):
        Gang(script="echo ${#names[@]}")
    with pytest.warns(GangWarning, match="command has '{#'"):
        Gang(command=["echo", "{#"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gang(script="{% raw %}echo ${#names[@]}{% endraw %}")
        Gang(script="echo ${{ '{#' }}names[@]}")


def test_names_that_the_runtime_sets_are_reserved() -> None:
    """Its module is read as text: it is for another Python, and stands alone."""
    file = pathlib.Path(__file__).parents[2] / "airflow_gpu/runtime/environment.py"
    functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    updates = [
        key.value
        for function in functions
        if function.name in ("node_environment", "rank_environment")
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"
        for argument in call.args
        if isinstance(argument, ast.Dict)
        for key in argument.keys
        if isinstance(key, ast.Constant)
    ]
    assert "RANK" in updates
    # PYTHONPATH is the author's too; the runtime only puts itself in front.
    assert {n for n in updates if not n.startswith("GANG_")} - {"PYTHONPATH"} == RESERVED_ENV


# --- JSON ----------------------------------------------------------------------------


@slow
@given(GANGS)
def test_json_both_ways(gang: Gang) -> None:
    text = gang.to_json()
    again = Gang.from_json(text)
    assert again == gang
    assert again.to_json() == text
    assert again.digest() == gang.digest()
    assert again.ignored == ()
    assert not again.templated
    assert Gang.from_dict(gang.to_dict()) == gang


@slow
@given(GANGS)
def test_unrendered_fields_make_the_same_gang(gang: Gang) -> None:
    assert Gang.from_fields(gang.fields()) == gang


@slow
@given(arguments())
def test_what_is_valid_may_be_given_as_text(fields: dict[str, Any]) -> None:
    """Rendering makes text of numbers."""
    gang = Gang(**fields)
    texts = {
        k: str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v
        for k, v in gang.fields().items()
    }
    texts["recovery"] = {k: str(v) for k, v in texts["recovery"].items()}
    texts["placement"] = {k: str(v) for k, v in texts["placement"].items()}
    again = Gang.from_fields(texts)
    assert (again.nodes, again.recovery, again.placement) == (gang.nodes, gang.recovery, gang.placement)
    assert (again.time_limit, again.memory, again.work) == (gang.time_limit, gang.memory, gang.work)


@slow
@given(GANGS, st.dictionaries(st.text(), JSON, max_size=3), st.dictionaries(st.text(), JSON, max_size=3))
def test_a_newer_version_is_read(gang: Gang, junk: dict[str, Any], inner: dict[str, Any]) -> None:
    data = json.loads(gang.to_json())
    junk = {f"+{name}": value for name, value in junk.items()}
    inner = {f"+{name}": value for name, value in inner.items()}
    data.update(junk, version=2)
    for part in ("placement", "checkpointing", "recovery", "function", "work"):
        if data[part] is not None:
            data[part].update(inner)
    again = Gang.from_json(json.dumps(data))
    assert again == gang
    assert again.digest() == gang.digest()
    parts = [p for p in ("placement", "checkpointing", "recovery", "function", "work") if data[p] is not None]
    assert sorted(again.ignored) == sorted([*junk, *(f"{part}.{name}" for part in parts for name in inner)])


@slow
@given(GANGS, st.data())
def test_an_older_version_is_read(gang: Gang, data: st.DataObject) -> None:
    full = json.loads(gang.to_json())
    kept = data.draw(st.sets(st.sampled_from(sorted(full))))
    kept |= {"command", "script", "function"}
    sparse = {
        name: value
        for name, value in full.items()
        if name in kept - {"min_nodes", "ranks_per_node", "launch"}
    }
    again = Gang.from_dict(sparse)
    for name in set(sparse) - {"version"}:
        assert getattr(again, name) == getattr(gang, name)
    assert Gang.from_dict({"script": "x"}) == Gang(script="x")


def test_text_in_json_is_text() -> None:
    """What was recorded is not read as a template or as a printed None, as rendered fields are."""
    for text in ("None", "{{ ds }}", "${#a}", "{'a': 1}"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gang = Gang.from_dict({"script": text, "env": {"A": text}, "team": text})
        assert (gang.script, gang.env["A"], gang.team) == (text, text, text)
        assert not gang.templated
        assert Gang.from_json(gang.to_json()) == gang


def test_json_is_plain() -> None:
    data = json.loads(Gang(command="x", time_limit="1h", memory="1GiB", work=3).to_json())
    assert data["version"] == 1
    assert (data["time_limit"], data["memory"], data["command"]) == (3600.0, 2**30, ["x"])
    assert data["work"] == {"hours": 3.0, "accelerator": None}
    assert set(data) == {"version", *Gang.model_fields}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no JSON"),
        ("[]", "must be a JSON object, got list"),
        ('{"version": "x", "script": "x"}', "version must be a number from 1, got 'x'"),
        ('{"version": 0, "script": "x"}', "version must be a number from 1, got 0"),
        ('{"script": "x", "nodes": 0}', "nodes must be at least 1, got 0"),
        ('{"nodes": 1}', "command, script or function is required"),
        ('{"script": "x", "recovery": 3}', "recovery must be a Recovery or a dict, got 3"),
        ('{"function": 3}', "function must be a function, got 3"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_json_that_is_no_gang(text: str, expected: str) -> None:
    with pytest.raises(GangError, match=r"^Gang: ") as caught:
        Gang.from_json(text)
    assert expected in str(caught.value)


@slow
@given(st.dictionaries(st.sampled_from([*Gang.model_fields, "version", "new"]), JSON, max_size=6))
def test_any_json_is_a_gang_or_a_gang_error(data: dict[str, Any]) -> None:
    try:
        gang = Gang.from_dict(data)
    except GangError as error:
        assert str(error)
    else:
        assert Gang.from_json(gang.to_json()) == gang


@slow
@given(st.dictionaries(st.sampled_from([*Gang.model_fields, "new"]), JSON, max_size=6))
def test_any_arguments_make_a_gang_or_a_gang_error(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gang = Gang(**fields)
        except GangError as error:
            assert all(line.startswith("Gang: ") for line in str(error).splitlines())
        else:
            assert gang.templated or Gang.from_json(gang.to_json()) == gang


def test_digests() -> None:
    gang = Gang(command="x")
    assert len(gang.digest()) == 64
    assert gang.digest() == Gang(command=["x"], nodes=1, recovery={}, placement=Placement()).digest()
    assert gang.digest() != gang.replace(nodes=2).digest()
    assert gang.digest() != gang.replace(recovery={"mode": "any"}).digest()


def test_digests_never_change() -> None:
    """A running job is recognised by it after an upgrade. New fields must not change it; nor may defaults."""
    assert Gang(script="x").digest() == "e1063637f11752598950da1a34c55b81477fdaa285d1e09b7e8e26970e6868f4"
    gang = Gang(command="x y", nodes=2, env={"A": "1"}, recovery={"mode": "any"}, work=3, targets=["a", "b"])
    assert gang.digest() == "e806438966c62f4be08084df66d3bad8f7cb89951e0807fe74df86c58ab25617"
