"""Random requests, as an author may write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.spec import RESERVED_ENV, Gang

DURATIONS = st.one_of(
    st.integers(min_value=1, max_value=10**6),
    st.floats(min_value=0.001, max_value=10**6),
    st.builds("{}m".format, st.integers(min_value=1, max_value=1000)),
    st.builds(
        "{}h{}m".format, st.integers(min_value=0, max_value=48), st.integers(min_value=1, max_value=59)
    ),
    st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=300)),
)
WORDS = st.text(alphabet=st.characters(exclude_characters="\0{", exclude_categories=["Cs"]))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 ._/-]{0,20}[A-Za-z0-9]", fullmatch=True).filter(
    lambda text: text != "None"
)
ENV_NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: name not in RESERVED_ENV and not name.startswith("GANG_")
)
SECRETS = st.one_of(
    st.builds("conn:{}#{}".format, st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.sampled_from(["password", "login", "extra.a.b"])),
    st.builds("var:{}".format, st.from_regex(r"[a-z_]{1,9}", fullmatch=True)),
)  # fmt: skip
COUNTS = st.integers(min_value=0, max_value=1000)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


def only(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


PLACEMENTS = only(
    max_wait=DURATIONS,
    move_after=st.none() | DURATIONS,
    start_timeout=DURATIONS,
    deadline=st.none() | DURATIONS,
)
CHECKPOINTINGS = only(
    interval=st.none() | DURATIONS,
    keep=st.integers(min_value=1, max_value=50),
    every=st.none() | st.integers(min_value=1, max_value=100000),
    on_change=st.sampled_from(["fresh", "resume"]),
    continue_previous=st.booleans(),
)
RECOVERIES = only(
    preemptions=st.none() | COUNTS,
    node_failures=st.none() | COUNTS,
    out_of_memory=COUNTS,
    application=COUNTS,
    mode=st.sampled_from(["infra", "any", "never"]),
    on_clear=st.sampled_from(["resume", "fresh"]),
    exclude_blamed_nodes=st.booleans(),
    fruitless=st.integers(min_value=1, max_value=50),
    unknown_limit=DURATIONS,
    backoff=st.integers(min_value=0, max_value=60),
    backoff_max=st.integers(min_value=60, max_value=6000),
)


def body(a: Any, b: Any = 1) -> Any:
    return a, b


FUNCTIONS = st.builds(lambda a, k: FunctionSource.of(body, (a,), k), JSON, only(b=JSON))


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """What a valid ``Gang(...)`` may be called with."""
    fields = draw(
        only(
            nodes=st.integers(min_value=1, max_value=500),
            gpus_per_node=st.sampled_from([0, 1, 4, 8]),
            accelerator=st.none() | NAMES,
            cpus=st.none() | st.integers(min_value=1, max_value=256),
            memory=st.none() | st.sampled_from(["64GiB", "1.5TiB", "512MB", 2**34]),
            image=st.none() | NAMES,
            env=st.dictionaries(ENV_NAMES, WORDS | st.integers(), max_size=3),
            time_limit=DURATIONS,
            barrier_timeout=DURATIONS,
            stop_grace=DURATIONS,
            work=st.none()
            | st.floats(min_value=0.01, max_value=10**5)
            | st.just({"hours": 3, "accelerator": "H100"}),
            priority=st.integers(min_value=-100, max_value=100),
            backfill_priority=st.none() | st.integers(min_value=-100, max_value=100),
            topology=st.none() | NAMES,
            targets=st.from_regex(r"[a-z_]{1,9}", fullmatch=True)
            | st.lists(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), min_size=1, max_size=4, unique=True),
            placement=PLACEMENTS,
            checkpointing=CHECKPOINTINGS,
            recovery=RECOVERIES,
            team=st.none() | NAMES,
        )
    )
    program = draw(st.sampled_from(["command", "script", "function"]))
    if program == "function":
        fields["function"] = draw(FUNCTIONS)
        launches = ["rank"]
    elif program == "script":
        fields["script"] = draw(WORDS.filter(lambda text: text.strip() not in ("", "None")))
        launches = ["rank", "node", "head"]
    else:
        fields["command"] = [
            draw(NAMES),
            *draw(st.lists(WORDS | st.integers() | st.floats(allow_nan=False), max_size=4)),
        ]
        launches = ["rank", "node", "head"]
    if draw(st.booleans()):
        fields["launch"] = draw(st.sampled_from(launches))
    if draw(st.booleans()):
        fields["min_nodes"] = draw(st.integers(min_value=1, max_value=fields.get("nodes", 1)))
    if draw(st.booleans()):
        gpus = fields.get("gpus_per_node", 1) or 1
        fields["ranks_per_node"] = gpus * draw(st.sampled_from([1, 2]))
    secrets = draw(st.dictionaries(ENV_NAMES, SECRETS, max_size=3))
    fields["secrets"] = {name: value for name, value in secrets.items() if name not in fields.get("env", {})}
    return fields


GANGS = arguments().map(lambda fields: Gang(**fields))
