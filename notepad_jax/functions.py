"""User-defined functions by name: `module:function`, or `file.py:function`.

Configs hold texts, and a run is gone on with by its config; so a function is known by its name
there, like everything else. What is given to the Python API as an object is `lent` under its
name for the time of the call; every other name is imported, from the working folder first.
Above: scoring.own (rewards), setup.builders (memory rules) and `api`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

Function = Callable[..., Any]

# A context variable and not a global one: two threads may train with functions of one name.
_lent: ContextVar[Mapping[str, Function]] = ContextVar("lent", default=MappingProxyType({}))


@contextlib.contextmanager
def lending(functions: Sequence[Function]) -> Iterator[list[str]]:
    """A context manager: in its block functions are found under the names it yields, in order.

    Two of one name (lambdas) are told apart by a number; what its name does not find again, an
    object or a method of one, always has one. Raises ValueError for what cannot be called.
    """
    here, names = dict(_lent.get()), []
    for function in functions:
        if not callable(function):
            raise ValueError(f"{function!r:.80} is no function; give one that can be called")
        name, number = name_of(function), 2
        if not _is_named(function):
            name, number = f"{name}#1", 2
        while name in here and here[name] is not function:
            name, number = f"{name_of(function)}#{number}", number + 1
        here[name] = function
        names.append(name)
    token = _lent.set(here)
    try:
        yield names
    finally:
        _lent.reset(token)


def name_of(function: Function) -> str:
    """Returns "module:function"; of an object that can be called, its class's."""
    known = function if hasattr(function, "__qualname__") else type(function)
    return f"{known.__module__}:{known.__qualname__}"


def _is_named(function: Function) -> bool:
    """Whether `name_of` is the function's own name: that of no class, and no object's method."""
    own = getattr(function, "__self__", None)
    return hasattr(function, "__qualname__") and isinstance(own, type | ModuleType | None)


def is_coroutine(function: Function) -> bool:
    """Whether a call gives something to await in the place of a value."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object's own
    )


def takes(function: Function, *arguments: Any) -> bool:
    """Whether a function can be called so; True where Python cannot tell, as of some in C."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def lent(name: str) -> Function | None:
    """Returns the function that was lent under a name, or None."""
    return _lent.get().get(name)


def named(name: str, key: str) -> Function:
    """Returns the function of a name that `key` of a config holds.

    Raises ValueError, in one line, where there is none.
    """
    found = lent(name)
    if found is not None:
        return found
    module, _, path = name.rpartition(":")
    if module == "__main__" or "<" in path or "#" in path:
        raise ValueError(
            f"{key} is {name!r}, a function of a script or a notebook: go on from there "
            f"(notepad_jax.train(..., resume=True)), or put it into a module"
        )
    try:
        found = _module(module)
    except (Exception, SystemExit) as problem:  # whatever a module does when it is imported
        raise ValueError(
            f"{key} is {name!r}, which cannot be imported: {type(problem).__name__}: {problem}"
        ) from problem
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ValueError(f"{key} is {name!r}, but {module} has no {path}") from None
    if not callable(found):
        raise ValueError(f"{key} is {name!r}, which is no function but {found!r:.80}")
    return found


def executed(spec: ModuleSpec) -> ModuleType:
    """Returns the module of a user's file; raises whatever the file does."""
    module = importlib.util.module_from_spec(spec)
    # Where its dataclasses look for it, and, once it is whole, who imports it.
    ours = sys.modules.setdefault(spec.name, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours:
            sys.modules.pop(spec.name, None)
        raise
    return module


@functools.cache
def _of_file(path: Path, changed: int) -> ModuleType:
    """The module of a file as it was `changed` last: run once, as other modules are."""
    return executed(importlib.util.spec_from_file_location(path.stem, path))


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name).absolute()
        return _of_file(path, path.stat().st_mtime_ns)
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before
