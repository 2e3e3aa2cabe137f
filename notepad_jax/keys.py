"""The keys of a config: fields with their type, their range, their unit and what they mean.

A section of a config is a frozen dataclass whose fields are made by `key`; `read` makes it of what
a user wrote, and refuses, in one line, a name, a type or a value that cannot be. So a key is
stated once: docs/configuration.md's tables are made of the same fields (`make docs`). Classes lie
where their values are used, or in `setup.config`. Below everything: it knows no section.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from notepad_jax.near import nearest

T = TypeVar("T")

# What is 0 or infinite in float32 is so on the device.
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
INT32 = 2**31 - 1


class May(Protocol):
    """A check of the values that a key may have."""

    def problem(self, value: Any) -> str | None:
        """Returns what is wrong with `value`, to be read behind a key's name; None if nothing."""


@dataclasses.dataclass(frozen=True)
class Range:
    """A check of numbers: `lowest` to `highest`, both included; `words` say it to a user."""

    lowest: float
    highest: float
    words: str

    def problem(self, value: Any) -> str | None:
        if not self.lowest <= value <= self.highest:  # true of nan, too
            return f"is {_shown(value)}; it must be {self.words}"
        return None


@dataclasses.dataclass(frozen=True)
class WordChoice:
    """A check of values that are one of some words, or a list of such."""

    known: tuple[str, ...]

    def problem(self, value: Any) -> str | None:
        alone = isinstance(value, str)
        for word in (value,) if alone else value:
            if word not in self.known:
                return f"{'is' if alone else 'has'} {word!r}; use one of {', '.join(self.known)}"
        return None


def _shown(number: float) -> str:
    long = isinstance(number, int) and number.bit_length() > 64
    return f"a number of {number.bit_length()} bits" if long else f"{number}"


def whole(lowest: int, highest: int = INT32) -> Range:
    return Range(lowest, highest, f"at least {lowest} and at most {highest}")


def words(*known: str) -> WordChoice:
    return WordChoice(known)


SHARE = Range(0, 1, "at least 0 and at most 1")  # probabilities, too
UNSIGNED = Range(0, LARGEST, "0 or more, and finite in float32")
SECONDS = Range(0.1, 86400, "at least 0.1 and at most 86400, a day")
POSITIVE = Range(TINY, LARGEST, "above 0 and finite, in float32")
NATS = Range(0, 100, "at least 0 and at most 100 nats")  # of a token: an entropy, a log ratio
# Of keys that say nothing else.
FINITE = Range(-LARGEST, LARGEST, "finite, in float32")
FINITE_WHOLE = whole(-INT32 - 1)


@dataclasses.dataclass(frozen=True)
class Key:
    """The metadata of a field; `unit` and `about` are a row of docs/configuration.md."""

    unit: str  # its type in words, or what it counts
    about: str  # what it means and what follows; "": the row of the field above is its own, too
    may: May | None = None


def key(unit: str, about: str, may: May | None = None, default: Any = dataclasses.MISSING) -> Any:
    """Makes a field of a section; one without a default has to be given when that is made."""
    return dataclasses.field(default=default, metadata={"key": Key(unit, about, may)})


def also(may: May | None = None, default: Any = dataclasses.MISSING) -> Any:
    """Makes a field that is explained together with the one above."""
    return key("", "", may, default)


# ---------------------------------------------------------------- sections


@functools.cache
def fields_of(section: type) -> dict[str, tuple[Any, Key | None]]:
    """Returns {name: (type, what is said of it)}; a field without a `Key` is a section."""
    hints = typing.get_type_hints(section)
    return {
        field.name: (hints[field.name], field.metadata.get("key"))
        for field in dataclasses.fields(section)
    }


def leaves(section: type, prefix: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yields ("grpo.clip_low", float, its `Key`), ...; sections in a list share theirs."""
    for name, (hint, said) in fields_of(section).items():
        if inner := _section(hint):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, said


def read(section: type[T], said: Mapping[str, Any], prefix: str = "") -> T:
    """Makes a section of names and values, where a sub-section is a mapping.

    Raises ValueError, in one line, for a name that there is not, one that is missing, and a value
    of another type or out of its range.
    """
    known, found = fields_of(section), {}
    for name in strangers(section, said, prefix):
        raise ValueError(name)
    for name, (hint, what) in known.items():
        if name in said:
            found[name] = _value(hint, what, prefix + name, said[name])
    if lacking := list(missing(section, said, prefix)):
        raise ValueError(f"there is no key {', '.join(lacking)}")
    try:
        return section(**found)
    except ValueError as problem:
        where = f"in section {prefix.rstrip('.')}: " if prefix else ""
        raise ValueError(f"{where}{problem}") from None


def strangers(section: type, said: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields, for every name that a section does not have, a line that says so."""
    known = fields_of(section)
    for name, value in said.items():
        if name not in known:
            yield unknown(prefix + name, [key for key, *_ in leaves(section, prefix)])
        elif (inner := _section(known[name][0])) and isinstance(value, Mapping):
            yield from strangers(inner, value, f"{prefix}{name}.")


def missing(section: type, said: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the keys without which a section cannot be made, and that are not said."""
    needed = {one.name for one in dataclasses.fields(section) if one.default is one.default_factory}
    for name, (hint, _) in fields_of(section).items():
        inner, there = _section(hint), said.get(name)
        if name not in said and name in needed:
            every = leaves(inner, f"{prefix}{name}.") if inner else ((prefix + name,),)
            yield from (key for key, *_ in every)
        elif inner and isinstance(there, Mapping):
            yield from missing(inner, there, f"{prefix}{name}.")


def check(section: Any) -> None:
    """Raises ValueError for a field whose value cannot be: for sections that are made by hand."""
    for name, (hint, what) in fields_of(type(section)).items():
        _value(hint, what, name, getattr(section, name))


def _value(hint: Any, what: Key | None, name: str, value: Any) -> Any:
    if inner := _section(hint):
        if typing.get_origin(hint) is tuple:
            # A ConfigDict within a list stays one, and is no Mapping.
            listed = value if isinstance(value, tuple | list) else [None]
            if not all(isinstance(one, inner) or hasattr(one, "items") for one in listed):
                raise ValueError(f"{name} needs a list of sections, and got {value!r}")
            return tuple(
                one if isinstance(one, inner) else read(inner, one, f"{name}.") for one in value
            )
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}, and is a section with keys of its own")
        return read(inner, value, f"{name}.")
    if (fitting := fitted(hint, value)) is None:
        raise ValueError(unlike(name, hint, value))
    may = what.may or {int: FINITE_WHOLE, float: FINITE}.get(hint)
    if may and (problem := may.problem(fitting)):
        raise ValueError(f"{name} {problem}")
    return fitting


def fitted(hint: Any, value: Any) -> Any:
    """Returns a value as the type wants it, a whole number as a float, say; None if it is not."""
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() > 1000 else float(value)
    if typing.get_origin(hint) is tuple:
        (of, _), listed = typing.get_args(hint), isinstance(value, tuple | list)
        return tuple(value) if listed and all(type(one) is of for one in value) else None
    return value if type(value) is hint else None


def unlike(name: str, hint: Any, value: Any) -> str:
    """Returns the message that a value is of another type."""
    return f"{name} needs {KINDS.get(hint, 'a list of texts')}, and got {value!r}"


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def unknown(name: str, known: Iterable[str]) -> str:
    """Returns the message that there is no such key, and which one comes near it."""
    known = sorted(known)
    alike = (one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2])
    near = nearest(name, known, 0.5) or next(alike, "")
    hint = f"did you mean {near}?" if near else "see the config file for its keys"
    return f"there is no config key {name!r}; {hint}"


@functools.cache
def _section(hint: Any) -> type | None:
    """Returns the dataclass of a hint: of a section, one that may be missing, or a list of them."""
    kinds = (hint, *typing.get_args(hint))
    return next((one for one in kinds if dataclasses.is_dataclass(one)), None)


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Returns {"grpo.clip_low": 0.2, ...} of a section, or of mappings in one another."""
    out: dict[str, Any] = {}
    for name, value in _items(section):
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def plain(value: Any) -> Any:
    """Returns a section as dicts, lists and scalars, for JSON."""
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
        return {name: plain(item) for name, item in _items(value)}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def _items(section: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(section, Mapping):
        return section.items()
    return ((name, value) for name, value in vars(section).items() if value is not None)


def changed(section: T, values: Mapping[str, Any]) -> T:
    """Returns a copy with other values: {"engine.pages": 400}; no range is looked at again."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        inner = found.get(first, getattr(section, first))
        found[first] = changed(inner, {rest: value}) if rest else value
    return dataclasses.replace(section, **found)
