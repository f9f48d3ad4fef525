"""A Python function that travels to the ranks as text.

Purpose: the image of a gang need not have the DAG file, so the function's own
source is sent, and what would fail there fails when the DAG is parsed: closures,
names of the module, arguments that are no JSON.

What it does not do: it runs nothing, and it does not look at what the function
imports; the image must have that.

Known limits: the source is read from the file of the function, so a function
made by ``exec`` or typed into a prompt is refused. Syntax newer than the image's
Python is found out by the image.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import functools
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from airflow_gpu.gang._model import Nested, opaque, templates
from airflow_gpu.gang._values import json_value
from airflow_gpu.gang.units import GangError

HANDLE: Final = "gang"
"""A parameter of this name receives the in-job handle from the runtime."""

_FUTURE: Final = "from __future__ import annotations\n"
_READS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL"})
_THERE: Final = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "__builtins__", "__debug__"}


@dataclass(frozen=True, repr=False)
class FunctionSource(Nested):
    """A function as text, and the arguments of its call on every rank.

    Make one with :meth:`of`. ``Gang(function=train)`` does so itself.

    :param name: name of the function.
    :param source: text of a module that defines it, and nothing else.
    :param args: positional arguments, JSON values (or, until Airflow has rendered them, templates).
    :param kwargs: named arguments, likewise.

    Example::

        def train(lr, gang):
            import torch
            ...

        FunctionSource.of(train, kwargs={"lr": 0.1}).call
        # {"name": "train", "args": [], "kwargs": {"lr": 0.1}}
    """

    KNOWN: ClassVar[frozenset[str]] = frozenset({"name", "source", "args", "kwargs"})

    name: str
    source: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> FunctionSource:
        """The source of ``fn``, checked to run on its own, with the arguments of its call.

        With neither ``args`` nor ``kwargs`` (None) the call is not checked yet;
        see :meth:`bind`. Decorators are taken off.

        Raises GangError, one line for each thing that is wrong: not a plain
        function (lambda, method, partial, generator, async, wrapped by another
        decorator), no source, closures and module globals (each by name),
        arguments that do not fit or are no JSON.
        """
        refused = _not_plain(fn)
        if refused is not None:
            raise GangError(_title(fn), refused)
        assert isinstance(fn, types.FunctionType)
        source = _source_of(fn)
        problems = list(_not_self_contained(fn, source))
        if problems:
            raise GangError(_title(fn), problems)
        made = cls(fn.__name__, source)
        return made if args is None and kwargs is None else made.bind(args or (), kwargs or {})

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> FunctionSource:
        """The same function, called with these arguments.

        They are checked against its signature, without the parameter ``gang``,
        and must be JSON values: tuples become lists, NaN and Infinity are
        refused since JSON has neither. Templates and XComArgs pass, to be
        rendered first. Raises GangError.
        """
        problems: list[str] = []
        definition = self._definition()
        try:
            args, kwargs = _fit(definition, tuple(args), dict(kwargs or {}))
        except TypeError as error:
            problems.append(str(error))
        kwargs = kwargs or {}
        plain = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
        paths = [plain[i] if i < len(plain) else f"args[{i}]" for i in range(len(args))]
        listed = [json_value(value, path, problems) for path, value in zip(paths, args, strict=True)]
        named = {name: json_value(value, name, problems) for name, value in kwargs.items()}
        if problems:
            raise GangError(_title(self), problems)
        return replace(self, args=tuple(listed), kwargs=named)

    @property
    def call(self) -> dict[str, Any]:
        """``{"name", "args", "kwargs"}``, JSON values only. Raises GangError while an XComArg is left."""
        call = {"name": self.name, "args": list(self.args), "kwargs": dict(self.kwargs)}
        if left := list(templates(call, test=opaque)):
            raise GangError(_title(self), f"has arguments that Airflow has not rendered: {', '.join(left)}")
        return call

    @property
    def wants_handle(self) -> bool:
        """The function has a parameter ``gang``."""
        return HANDLE in {parameter.name for parameter in _parameters(self._definition())}

    def fields(self) -> dict[str, Any]:
        """For Airflow to render: the arguments in the open, the source where Jinja cannot see it."""
        bare = replace(self, args=(), kwargs={})
        return {"source": bare, "args": list(self.args), "kwargs": dict(self.kwargs)}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: ``{"name", "source", "args", "kwargs"}``."""
        return {"source": self.source, **self.call}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FunctionSource:
        """Reads :meth:`to_dict` and :meth:`fields`; unknown fields are ignored. Raises GangError.

        As with :meth:`of`, a call without any arguments is not checked here.
        """
        source, args, kwargs = data.get("source"), data.get("args", []), data.get("kwargs", {})
        if isinstance(source, str) and isinstance(data.get("name"), str):
            source = cls(data["name"], source)
        fits = isinstance(args, (list, tuple)) and isinstance(kwargs, Mapping)
        if not fits or not isinstance(source, FunctionSource):
            raise GangError("function", "must be a function, or what FunctionSource.to_dict gave")
        source._definition()
        return source.bind(args, kwargs) if args or kwargs else source

    def __repr__(self) -> str:
        # Airflow shows it, and compares it to tell whether a DAG has changed: all of it, and no address.
        call = f"args={self.args!r}, kwargs={self.kwargs!r}"
        return f"FunctionSource(name={self.name!r}, source={self.source!r}, {call})"

    def _definition(self) -> ast.FunctionDef:
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError) as error:
            raise GangError(_title(self), f"has a source that is no Python: {error}") from None
        for node in reversed(tree.body):
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                return node
        raise GangError(_title(self), "has a source that does not define it")


def _title(fn: Any) -> str:
    name = fn.name if isinstance(fn, FunctionSource) else getattr(fn, "__name__", type(fn).__name__)
    return f"function {name!r}"


def _not_plain(fn: Any) -> str | None:
    """Why ``fn`` cannot be sent by its source; None when it can."""
    if isinstance(fn, functools.partial):
        return "is a functools.partial: give its function, and its arguments as arguments"
    if inspect.ismethod(fn):
        return "is a method: its object does not travel; make it a plain function"
    if isinstance(fn, type):
        return "is a class: give a plain function that makes the object"
    if inspect.isbuiltin(fn) or not isinstance(fn, types.FunctionType):
        return f"is a {type(fn).__name__}, not a function written in Python"
    if fn.__name__ == "<lambda>" or fn.__code__.co_name == "<lambda>":
        return "is a lambda: write it with def"
    if hasattr(fn, "__wrapped__") or fn.__code__.co_name != fn.__name__:
        return "is wrapped by a decorator, which would not travel: call what it does inside the function"
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        return "is async: make it a plain function and use asyncio.run inside it"
    if inspect.isgeneratorfunction(fn):
        return "is a generator (it has yield): make it a plain function"
    return None


# --- the source ----------------------------------------------------------------


def _source_of(fn: types.FunctionType) -> str:
    """Text that defines ``fn`` and nothing else: no decorators, no annotations in its signature."""
    try:
        text = inspect.getsource(fn)
    except (OSError, TypeError, IndentationError):
        raise GangError(_title(fn), "has no source to read: define it in a file") from None
    node, text = _parsed(text, fn)
    lines = io.StringIO(text).readlines()
    body_starts = min([node.body[0].lineno, *(d.lineno for d in getattr(node.body[0], "decorator_list", []))])
    header_ends = _logical_line_end(lines, node.lineno)
    node.decorator_list = []
    node.returns = None
    for argument in _all_arguments(node.args):
        argument.annotation = None
    if body_starts <= header_ends:  # def f(): return 1
        result = ast.unparse(node) + "\n"
    else:  # the body stays as it was written, with its comments
        body, node.body = "".join(lines[header_ends : node.end_lineno]), [ast.Pass()]
        header = ast.unparse(node).removesuffix("\n    pass")
        result = f"{header}\n{body.rstrip()}\n"
    future = fn.__code__.co_flags & __future__.annotations.compiler_flag
    return (_FUTURE if future else "") + result


def _logical_line_end(lines: list[str], start: int) -> int:
    """Number of the line on which the statement (here: the header of a def) that starts on a line ends."""
    for token in tokenize.generate_tokens(iter(lines[start - 1 :]).__next__):
        if token.type == tokenize.NEWLINE:
            return start - 1 + token.start[0]
    return start


def _parsed(text: str, fn: types.FunctionType) -> tuple[ast.FunctionDef, str]:
    """The definition, and the text that its line numbers count in."""
    try:
        if text[:1] not in " \t":
            return _definition_in(ast.parse(text), fn), text
        # Inside "with DAG(...):" a function is indented. Taking that off also takes it
        # off texts in triple quotes; where it would change the program, it stays.
        indented = "if 1:\n" + text
        node = _definition_in(ast.parse(indented), fn)
    except SyntaxError:
        raise GangError(_title(fn), "has a source that cannot be read alone: use a plain def") from None
    text = textwrap.dedent(text)
    try:
        again = _definition_in(ast.parse(text), fn)
    except (SyntaxError, GangError):
        return node, indented
    return (again, text) if ast.dump(again) == ast.dump(node) else (node, indented)


def _definition_in(tree: ast.Module, fn: types.FunctionType) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == fn.__code__.co_name:
            names = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
            if names == fn.__code__.co_varnames[: fn.__code__.co_argcount]:
                return node
    raise GangError(_title(fn), "is not in its file as it was loaded: the file has changed since")


def _all_arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (a for a in (arguments.vararg, arguments.kwarg) if a is not None)


# --- does it stand on its own? ---------------------------------------------------


def _not_self_contained(fn: types.FunctionType, source: str) -> Iterator[str]:
    own = fn.__name__
    module = compile(source, f"<{own}>", "exec", dont_inherit=True)
    closures = [name for name in fn.__code__.co_freevars if name != own]
    if "__class__" in closures:
        yield "uses super() or __class__ of the class around it: make it a plain function"
        closures.remove("__class__")
    if closures:
        yield (
            f"uses {_names(closures)} of the function around it, which {_does(closures)} not travel: "
            "pass it as an argument or define it inside the function"
        )
    at_definition, used = _reads(module, deep=False) - _THERE, set[str]()
    for code in module.co_consts:
        if isinstance(code, types.CodeType) and code.co_name == own:
            used |= _reads(code)
        elif isinstance(code, types.CodeType):
            at_definition |= _reads(code) - _THERE
    if at_definition:
        yield f"uses {_names(sorted(at_definition))} in the default of a parameter: write the value there"
    used -= {own, *_THERE, *closures, "__class__"}
    modules = sorted(name for name in used if isinstance(fn.__globals__.get(name), types.ModuleType))
    if modules:
        yield f"uses {_names(modules)} imported outside of it: import inside the function"
    others = sorted(used.difference(modules))
    if others:
        yield (
            f"uses {_names(others)} of its module, which {_does(others)} not travel: "
            "import or define inside the function, or pass as an argument"
        )


def _reads(code: types.CodeType, deep: bool = True) -> set[str]:
    """Names that the code looks up in its module, before it has defined them there itself."""
    read: set[str] = set()
    stored: set[str] = set()
    made: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in _READS and step.argval not in stored:
            read.add(step.argval)
        elif step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stored.add(step.argval)
            if step.opname == "STORE_GLOBAL":
                made.add(step.argval)
    if deep:
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                read |= _reads(inner) - made
    return read


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _does(names: Sequence[str]) -> str:
    return "does" if len(names) == 1 else "do"


# --- do the arguments fit? -------------------------------------------------------


def _parameters(node: ast.FunctionDef) -> list[inspect.Parameter]:
    a, kinds = node.args, inspect.Parameter
    plain = [*a.posonlyargs, *a.args]
    first_default = len(plain) - len(a.defaults)
    made = []
    for i, argument in enumerate(plain):
        kind = kinds.POSITIONAL_ONLY if i < len(a.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        made.append(kinds(argument.arg, kind, default=kinds.empty if i < first_default else None))
    if a.vararg:
        made.append(kinds(a.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        made.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if a.kwarg:
        made.append(kinds(a.kwarg.arg, kinds.VAR_KEYWORD))
    return made


def _fit(
    node: ast.FunctionDef, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they travel. Raises TypeError when they do not fit the signature.

    The runtime adds ``gang`` by name. So that it never meets a positional
    argument there, what stands at or after it is passed by name as well.
    """
    parameters = _parameters(node)
    place = next((i for i, p in enumerate(parameters) if p.name == HANDLE), None)
    if place is None:
        _bound(parameters, args, kwargs)
        return args, kwargs
    handle = parameters.pop(place)
    if handle.kind not in (handle.POSITIONAL_OR_KEYWORD, handle.KEYWORD_ONLY):
        raise TypeError("has a parameter 'gang' that cannot be given by name: write it after a *")
    if HANDLE in kwargs:
        raise TypeError("gets 'gang' from the runtime: do not pass it")
    bound = _bound(parameters, args, kwargs)
    if handle.kind is handle.KEYWORD_ONLY or len(args) <= place:
        return args, kwargs
    after = [p for p in parameters[place:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL and bound.arguments.get(p.name) for p in parameters):
        raise TypeError("takes any number of arguments after 'gang': write 'gang' after the *")
    moved = {p.name: bound.arguments[p.name] for p in after if p.name in bound.arguments}
    return args[:place], {**moved, **kwargs}


def _bound(
    parameters: list[inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    # A default before one without (once ``gang=None`` in the middle is out) is legal here.
    signature = inspect.Signature(parameters, __validate_parameters__=False)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        wants = ", ".join(str(p) for p in parameters) or "nothing"
        raise TypeError(f"cannot be called like this: {error}; it takes ({wants})") from None
