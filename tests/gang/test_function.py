"""Functions that travel as text. They are real ones, defined here; what they make of it is run in a bare namespace."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import functools
import json
import math
import pathlib
import pickle
import re
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.gang.function import FunctionSource
from airflow_gpu.gang.spec import Gang
from airflow_gpu.gang.units import GangError

LIMIT = 3


def mark(fn: Any) -> Any:
    return fn


def wrap(fn: Any) -> Any:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return inner


def run(made: FunctionSource, **handle: Any) -> Any:
    """As the runtime does it: nothing but the text."""
    space: dict[str, Any] = {"__name__": "job"}
    exec(made.source, space)
    call = json.loads(json.dumps(made.call))
    return space[call["name"]](*call["args"], **call["kwargs"], **handle)


def problems(fn: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(GangError) as caught:
        FunctionSource.of(fn, args, kwargs)
    return str(caught.value)


# --- functions that travel -----------------------------------------------------


@mark
def plain(
    a: int,
    b: math.floor = 2,  # type: ignore[valid-type]
    *rest: re.Pattern[str],
    c: Any = -1.5,
    **more: pathlib.Path,
) -> decimal.Decimal:
    # this comment stays
    """Doc."""
    import math as m

    def helper(x: int) -> float:
        return m.floor(x) + len(rest)

    return (helper(a), b, c, sorted(more))  # type: ignore[return-value]


def test_a_plain_function() -> None:
    made = FunctionSource.of(plain, (1, 5), {"c": 3, "z": 4})
    assert made.name == "plain"
    assert made.call == {"name": "plain", "args": [1, 5], "kwargs": {"c": 3, "z": 4}}
    assert run(made) == (1, 5, 3, ["z"])
    assert "def plain(a, b=2, *rest, c=-1.5, **more):" in made.source
    assert "# this comment stays" in made.source
    assert "@mark" not in made.source


def one_line(x): return x + 1  # fmt: skip


def fact(n):
    return 1 if n < 2 else n * fact(n - 1)


def with_class():
    class Pair:
        one = 1
        two = one + 1

        def total(self):
            return self.one + self.two + Pair.one

    return Pair().total()


def with_comprehensions(n):
    squares = [i * i for i in range(n)]
    return {k: v for k, v in enumerate(squares)}, sum(x for x in squares if x)


def attributes_are_no_globals():
    class Box:
        LIMIT = 7

    return Box.LIMIT, "LIMIT", dict(LIMIT=1)["LIMIT"]


def global_made_inside():
    global MADE_HERE

    def read():
        return MADE_HERE

    MADE_HERE = 5  # type: ignore[name-defined]
    return read()


def text_with_margins():
    return """
one
    two
"""


def decorated_inside():
    import functools

    @functools.lru_cache
    def inner(x):
        return x * 2

    return inner(4)


def nested_first():
    def inner():
        return 1

    return inner()


def header_over_lines(
    a,
    b={"x": (1, 2)},  # noqa: B006
):

    return a, b


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (one_line, (1,), 2),
        (fact, (5,), 120),
        (with_class, (), 4),
        (with_comprehensions, (3,), ({0: 0, 1: 1, 2: 4}, 5)),
        (attributes_are_no_globals, (), (7, "LIMIT", 1)),
        (global_made_inside, (), 5),
        (text_with_margins, (), "\none\n    two\n"),
        (decorated_inside, (), 8),
        (nested_first, (), 1),
        (header_over_lines, (1,), (1, {"x": (1, 2)})),
    ],
)
def test_it_does_there_what_it_does_here(fn: Any, args: tuple[Any, ...], expected: Any) -> None:
    assert fn(*args) == expected
    assert run(FunctionSource.of(fn, args)) == expected


def test_indented_functions() -> None:
    # As inside "with DAG(...):", with a text that has less margin than the code.
    if True:

        @mark
        def indented(n):
            # kept
            return (
                f"{n}"
                + """
a
        b"""
            )

        def simple(n):
            # kept
            return n

    made = FunctionSource.of(indented, (1,))
    assert run(made) == indented(1) == "1\na\n        b"
    made = FunctionSource.of(simple, (1,))
    assert made.source.endswith("def simple(n):\n    # kept\n    return n\n")


def test_recursion_of_a_local_function() -> None:
    def count(n):
        return n if n == 0 else count(n - 1)

    assert run(FunctionSource.of(count, (3,))) == 0


# --- functions that do not -----------------------------------------------------


def generator():
    yield 1


async def coroutine():
    return 1


async def async_generator():
    yield 1


class Thing:
    def method(self):
        return 1

    def __call__(self):
        return 1

    @staticmethod
    def static(x):
        return x

    def uses_super(self):
        return super().__init__()


@wrap
def wrapped():
    return 1


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda: 1, "function '<lambda>': is a lambda: write it with def"),
        (generator, "function 'generator': is a generator (it has yield)"),
        (coroutine, "function 'coroutine': is async"),
        (async_generator, "function 'async_generator': is async"),
        (Thing().method, "function 'method': is a method"),
        (Thing, "function 'Thing': is a class"),
        (Thing(), "function 'Thing': is a Thing, not a function written in Python"),
        (len, "function 'len': is a builtin_function_or_method, not a function written in Python"),
        (functools.partial(plain, 1), "function 'partial': is a functools.partial"),
        (wrapped, "function 'wrapped': is wrapped by a decorator, which would not travel"),
    ],
)
def test_what_is_no_plain_function(fn: Any, expected: str) -> None:
    assert problems(fn).startswith(expected)


def test_static_methods_are_plain() -> None:
    assert run(FunctionSource.of(Thing.static, (4,))) == 4


def test_source_that_cannot_be_read() -> None:
    space: dict[str, Any] = {}
    exec("def made():\n    return 1\n", space)
    assert problems(space["made"]) == "function 'made': has no source to read: define it in a file"


def test_source_that_has_changed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def fn(a):\n    return a\n")
    space: dict[str, Any] = {"__name__": "changing", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), space)
    file.write_text("def fn(a, b):\n    return b\n# longer\n")
    assert "is not in its file as it was loaded" in problems(space["fn"], 1)


def uses_module():
    return math.pi + dt.MAXYEAR


def uses_names():
    def inner():
        class Deep:
            value = LIMIT

            def method(self):
                return [run for _ in range(LIMIT)]

        return Deep

    return inner


def default_from_module(a=LIMIT, b=[LIMIT for _ in range(1)]):  # noqa: B006
    return a, b


def nested_annotation_is_text():
    def inner(x: Any) -> pathlib.Path:
        return x

    return inner(1)


def writes_global():
    global LIMIT
    LIMIT += 1


def test_globals_are_named() -> None:
    assert problems(uses_module) == (
        "function 'uses_module': uses 'dt', 'math' imported outside of it: import inside the function"
    )
    assert problems(uses_names) == (
        "function 'uses_names': uses 'LIMIT', 'run' of its module, which do not travel: "
        "import or define inside the function, or pass as an argument"
    )
    assert problems(default_from_module) == (
        "function 'default_from_module': uses 'LIMIT' in the default of a parameter: write the value there"
    )
    assert "uses 'LIMIT' of its module" in problems(writes_global)
    # This file has "from __future__ import annotations", which travels.
    assert run(FunctionSource.of(nested_annotation_is_text, ())) == 1


def test_closures_are_named() -> None:
    lr, steps = 0.1, 5

    def train(a=1):
        def inner():
            return steps + math.pi

        return lr, inner

    assert problems(train).splitlines() == [
        "function 'train': uses 'lr', 'steps' of the function around it, which do not travel: "
        "pass it as an argument or define it inside the function",
        "function 'train': uses 'math' imported outside of it: import inside the function",
    ]
    assert problems(Thing.uses_super) == (
        "function 'uses_super': uses super() or __class__ of the class around it: make it a plain function"
    )


# --- arguments -------------------------------------------------------------------


class Key(str):
    pass


class Scalar:
    """Like a number of numpy."""

    def item(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"start": dt.datetime(2026, 1, 1)}, "'a[\"start\"]' is a datetime: * ranks; pass its isoformat()"),  # noqa: DTZ001
        ([1, dt.date(2026, 1, 1)], "'a[1]' is a date: * ranks; pass its isoformat()"),
        (dt.timedelta(1), "'a' is a timedelta: * ranks; pass its total_seconds()"),
        ([{"x": {3}}], "'a[0][\"x\"]' is a set: * ranks; pass a sorted list"),
        (b"x", "'a' is a bytes: * ranks; pass text"),
        (pathlib.Path("x"), "'a' is a PosixPath: * ranks; pass its str()"),
        (decimal.Decimal(1), "'a' is a Decimal: * ranks; pass a float or text"),
        (uuid.UUID(int=1), "'a' is a UUID: * ranks; pass text"),
        (Scalar(), "'a' is a Scalar: * ranks; pass its item()"),
        (object(), "'a' is a object: * ranks"),
        (float("nan"), "'a' is nan, which JSON does not have: pass None or text"),
        ([float("-inf")], "'a[0]' is -inf, which JSON does not have: pass None or text"),
        ({1: 2}, "'a' has the key 1: keys of JSON are text; pass '1'"),
    ],
)
def test_arguments_are_json(value: Any, expected: str) -> None:
    expected = expected.replace("* ranks", "only JSON values travel to the ranks")
    assert problems(one_argument, value) == f"function 'one_argument': argument {expected}"
    assert problems(one_argument, a=value) == f"function 'one_argument': argument {expected}"


def one_argument(a):
    return a


def test_an_argument_that_holds_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "nested deeper than 64, or holds itself" in problems(one_argument, loop)


def test_all_wrong_arguments_are_named() -> None:
    assert problems(plain, {1}, 2, {3}, c=b"").count("\n") == 2


def test_arguments_become_what_json_makes_of_them() -> None:
    made = FunctionSource.of(one_argument, (({"k": (1, Key("x"), True, None, 2**70)},),))
    assert made.args == ([{"k": [1, "x", True, None, 2**70]}],)
    assert type(made.args[0][0]["k"][1]) is str
    assert run(made) == made.args[0]


def test_positional_arguments_beyond_the_names() -> None:
    assert "argument 'args[2]' is a set" in problems(plain, 1, 2, {3})
    assert "argument 'z' is a set" in problems(plain, 1, z={3})


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_any_json_value_arrives(value: Any) -> None:
    assert (
        run(FunctionSource(one_argument.__name__, "def one_argument(a):\n    return a\n").bind((value,)))
        == value
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, "missing a required argument: 'a'; it takes (a, b=None, *rest, c=None, **more)"),
        ((1,), {"a": 1}, "multiple values for argument 'a'"),
    ],
)
def test_arguments_fit(args: Any, kwargs: Any, expected: str) -> None:
    text = problems(plain, *args, **kwargs)
    assert text.startswith("function 'plain': cannot be called like this: ")
    assert expected in text


def test_too_many_arguments() -> None:
    assert "too many positional arguments; it takes (a)" in problems(one_argument, 1, 2)
    assert "unexpected keyword argument 'z'; it takes (a)" in problems(one_argument, 1, z=2)
    assert "it takes (nothing)" in problems(fact_free, 1)


def fact_free():
    return 1


def test_not_bound_yet() -> None:
    made = FunctionSource.of(one_argument)
    assert made.call == {"name": "one_argument", "args": [], "kwargs": {}}
    assert run(made.bind([3])) == 3
    assert run(made.bind(kwargs={"a": 4})) == 4
    with pytest.raises(GangError, match="missing a required argument: 'a'"):
        made.bind()
    # A decorator binds it when the arguments are rendered; until then it passes, but not beyond.
    gang = Gang(function=made)
    assert Gang.from_fields(gang.fields(), rendered=False) == gang
    assert Gang.from_fields({**gang.fields(), "function": made.bind([3])}).function == made.bind([3])
    with pytest.raises(GangError, match="Gang: function 'one_argument' cannot be called like this: missing"):
        Gang.from_fields(gang.fields())


# --- the handle --------------------------------------------------------------------


def handle_first(gang, a, b=2):
    return gang, a, b


def handle_last(a, gang):
    return gang, a


def handle_default(a, gang=None, b=2):
    return gang, a, b


def handle_keyword(*rest, gang, b=2):
    return gang, rest, b


def handle_before_rest(a, gang, *rest):
    return gang, a, rest


def handle_positional(gang, /, a):
    return gang, a


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        (handle_first, (1,), {}, ("G", 1, 2)),
        (handle_first, (1, 3), {}, ("G", 1, 3)),
        (handle_first, (1,), {"b": 4}, ("G", 1, 4)),
        (handle_last, (1,), {}, ("G", 1)),
        (handle_last, (), {"a": 1}, ("G", 1)),
        (handle_default, (1, 3), {}, ("G", 1, 3)),
        (handle_keyword, (1, 3), {}, ("G", (1, 3), 2)),
        (handle_before_rest, (1,), {}, ("G", 1, ())),
    ],
)
def test_the_handle_is_added_by_name(fn: Any, args: Any, kwargs: Any, expected: Any) -> None:
    made = FunctionSource.of(fn, args, kwargs)
    assert made.wants_handle
    assert run(made, gang="G") == expected
    assert made.bind(made.args, made.kwargs) == made


def test_the_handle_is_not_passed() -> None:
    assert "gets 'gang' from the runtime: do not pass it" in problems(handle_last, 1, gang=2)
    assert "missing a required argument: 'a'" in problems(handle_last)
    assert "'gang' that cannot be given by name" in problems(handle_positional, 1)
    assert "write 'gang' after the *" in problems(handle_before_rest, 1, 2)
    assert not FunctionSource.of(plain).wants_handle


# --- travelling ----------------------------------------------------------------------


def test_json_both_ways() -> None:
    made = FunctionSource.of(plain, (1,), {"c": [1, 2]})
    data = json.loads(json.dumps(made.to_dict()))
    assert set(data) == {"name", "source", "args", "kwargs"}
    assert FunctionSource.from_dict(data) == made
    assert FunctionSource.from_dict({**data, "newer": 1}) == made
    assert FunctionSource.from_dict(made.fields()) == made
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "must be a function"),
        ({"name": "f", "source": 3}, "must be a function"),
        ({"name": "f", "source": "def f(): pass", "args": "x"}, "must be a function"),
        ({"name": "f", "source": "def g(): pass"}, "has a source that does not define it"),
        ({"name": "f", "source": "def f(:"}, "has a source that is no Python"),
        ({"name": "f", "source": "def f(): pass", "args": [1]}, "too many positional arguments"),
        ({"name": "f", "source": "def f(a): pass", "kwargs": {"b": 1}}, "missing a required argument: 'a'"),
    ],
)
def test_json_that_is_no_function(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(GangError, match=expected):
        FunctionSource.from_dict(data)


class XCom:
    def resolve(self, context: Any) -> Any:
        return context


def test_templates_wait() -> None:
    made = FunctionSource.of(one_argument, (["{{ ds }}", XCom()],))
    with pytest.raises(GangError, match=r"has arguments that Airflow has not rendered: args\[0\]\[1\]"):
        _ = made.call
    fields = made.fields()
    assert isinstance(fields["source"], FunctionSource)
    assert fields["args"][0][0] == "{{ ds }}"
    assert not callable(fields["source"])  # Airflow calls what is callable in a templated field
    assert not hasattr(fields["source"], "resolve")


def test_its_text_has_no_address() -> None:
    # Airflow keeps the text of a templated field, and makes a new DAG version when it differs.
    made = FunctionSource.of(one_argument, (1,))
    assert str(made) == repr(made) == str(FunctionSource.of(one_argument, (1,)))
    assert "return a" in str(made)
    assert " at 0x" not in str(made)


def test_in_a_gang() -> None:
    gang = Gang(function=handle_free)
    assert gang.function is not None
    assert gang.function.call["args"] == []
    assert Gang.from_json(gang.to_json()) == gang
    with pytest.raises(GangError) as caught:
        Gang(function=uses_module, nodes=0)
    assert str(caught.value).splitlines() == [
        "Gang: nodes must be at least 1, got 0",
        "Gang: function 'uses_module' uses 'dt', 'math' imported outside of it: import inside the function",
    ]
    with pytest.raises(GangError, match="Gang: function must be a function, got 3"):
        Gang(function=3)  # type: ignore[arg-type]
    with pytest.raises(GangError, match="function 'one_argument' cannot be called like this"):
        Gang(function=one_argument)


def handle_free(gang):
    return gang
