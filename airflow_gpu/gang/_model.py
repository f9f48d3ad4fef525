"""What the parts of a request have in common: templates pass, errors are sentences, newer JSON is read.

Purpose: :class:`Part` is a frozen pydantic model that raises
:class:`~airflow_gpu.gang.units.GangError` from its constructor. At parse time a
field may hold a Jinja string or an XComArg; that field is then left alone and
checked when Airflow has rendered it.

Validation therefore has three modes: as written (the constructor: templates
pass), rendered (text stands for values), and recorded (JSON of our own: neither).
"""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from airflow_gpu.gang._explain import explain, part_of
from airflow_gpu.gang.units import GangError, GangWarning

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as Meta
else:
    Meta = type(BaseModel)

P = TypeVar("P", bound="Part")
Mode = Literal["written", "rendered", "recorded"]

_JINJA: Final = re.compile(r"\{[{%#]")


# --- templates -------------------------------------------------------------------


def opaque(value: Any) -> bool:
    """Airflow will resolve this object itself: an XComArg, or anything else that has ``resolve``."""
    return not isinstance(value, (type, os.PathLike)) and callable(getattr(value, "resolve", None))


def is_template(value: Any) -> bool:
    """There is still something to render in this very value (not in what it holds)."""
    return bool(_JINJA.search(value)) if isinstance(value, str) else opaque(value)


def templates(value: Any, path: str = "", test: Callable[[Any], bool] = is_template) -> Iterator[str]:
    """Paths of what is still to be rendered in plain fields."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from templates(item, f"{path}.{name}" if path else str(name), test)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from templates(item, f"{path}[{i}]", test)
    elif test(value):
        yield path


def mode_of(info: ValidationInfo) -> Mode:
    mode: Mode = (info.context or {}).get("mode", "written")
    return mode


def _unprinted(value: Any) -> Any:
    """A list or dict that was rendered into text: Jinja prints one as Python does, ``| tojson`` as JSON."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(value.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(found, (dict, list)):
                return found
    return value


# --- the model -------------------------------------------------------------------


class _Explaining(Meta):
    """Makes the call of a class raise GangError.

    An ``__init__`` would do that too, and hide from pydantic which field of which part is wrong.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            if args:
                raise GangError(cls.__name__, "takes keyword arguments only")
            made = guarded(cls, lambda: super(_Explaining, cls).__call__(**fields), fields)
            for advice in made._advice():
                warnings.warn(f"{cls.__name__}: {advice}", GangWarning, stacklevel=2)
            return made


def guarded(cls: type[P], make: Callable[[], P], data: Any) -> P:
    """``make()``, with pydantic's errors told as a GangError.

    That is raised outside of the ``except`` block: pydantic's own error repeats
    every input, a secret too, and must not travel along as its context.
    """
    try:
        return make()
    except ValidationError as error:
        problems = list(explain(cls, error))
        wrong = {str(item["loc"][0]) for item in error.errors(include_url=False) if item["loc"]}
    # pydantic looks at fields together only when each is right; the author wants to know all.
    problems.extend(text for text in cls._across(data, wrong) if text not in problems)
    raise GangError(cls.__name__, problems)


class Part(BaseModel, metaclass=_Explaining):
    """A frozen part of a request. Its fields are checked when it is made, and never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    CONTAINERS: ClassVar[frozenset[str]] = frozenset()
    """Fields that hold a list or a mapping: rendered text of one is read as such."""

    NEVER_EMPTY: ClassVar[frozenset[str]] = frozenset()
    """Optional fields of which an author's ``""`` is a mistake, not the absence of a value."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _let_templates_pass(cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        mode, name = mode_of(info), info.field_name or ""
        if mode == "written" and is_template(value):
            return value
        if mode == "rendered" and name in cls.CONTAINERS:
            value = _unprinted(value)
        empty = ("", "None") if mode == "rendered" else ("",)  # Jinja prints None as "None"
        meant = mode != "written" or name not in cls.NEVER_EMPTY
        if isinstance(value, str) and value.strip() in empty and cls._optional(name) and meant:
            return None
        return check(value)

    @classmethod
    def _optional(cls, name: str) -> bool:
        return type(None) in get_args(cls.model_fields[name].annotation)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._across(self.__dict__, set()))
        if problems:
            raise GangError(type(self).__name__, problems)
        return self

    @classmethod
    def _across(cls, data: Mapping[str, Any], wrong: set[str]) -> Iterator[str]:
        """What is wrong between fields, leaving out those that are ``wrong`` by themselves or templates."""
        yield from ()

    def _advice(self) -> Iterator[str]:
        """What works, and is not what the author would want."""
        yield from ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(repr(self))

    def fields(self) -> dict[str, Any]:
        """Plain nested dicts and lists, for Airflow to render."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    @classmethod
    def _from(cls, data: Mapping[str, Any], mode: Mode) -> Self:
        if not isinstance(data, Mapping):
            raise GangError(cls.__name__, f"must be a dict of its fields, got a {type(data).__name__}")
        return guarded(cls, lambda: cls.model_validate(dict(data), context={"mode": mode}), data)


class Nested:
    """Something in a field of a part, beside other parts, that has fields to render."""

    def fields(self) -> dict[str, Any]:
        raise NotImplementedError


def _plain(value: Any) -> Any:
    if isinstance(value, (Part, Nested)):
        return value.fields()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# --- JSON of other versions --------------------------------------------------------


def known(
    cls: type[BaseModel], data: Mapping[str, Any], path: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``data`` without the fields that this version does not know, and the paths of those."""
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in data.items():
        if name not in cls.model_fields:
            ignored.append(f"{path}{name}")
            continue
        part = part_of(cls.model_fields[name].annotation)
        if part is not None and isinstance(value, Mapping):
            kept[name], more = known(part, value, f"{path}{name}.")
            ignored.extend(more)
        else:
            kept[name] = value
    return kept, tuple(ignored)


def beyond(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` without what is at its default."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := beyond(value, default):
                kept[name] = inner
        elif name not in defaults or value != default:
            kept[name] = value
    return kept
