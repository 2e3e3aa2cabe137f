"""Checked access to a published JSON object's values.

A config.json comes from anywhere: a number may be a string, a list, true, 10^400 or NaN. Every
value that means something to us goes through one of these methods, which return what they
promise or raise one line that names the key; null counts as silence. Above: `config` and
`names`; below: `storage`, for how a value is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from notepad_jax.checkpoint.hf.storage import quoted

LARGEST_SIZE = 2**31 - 1  # of one axis, in elements; arrays are indexed by 32 bits
SMALLEST, LARGEST = 1e-30, 1e30  # numbers whose products float32 still holds


class ImportProblem(ValueError):
    """A folder that is not a policy we can read; the message names what is wrong in it."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object with checked access, and its name for messages; methods raise ImportProblem."""

    text: Mapping[str, Any]
    where: str

    def said(self, key: str) -> bool:
        """Whether there is a value for `key`."""
        return self.text.get(key) is not None

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to LARGEST_SIZE."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, "a positive whole number" if least else "a whole number from 0")
        if value > LARGEST_SIZE:
            raise self.wrong(key, f"a size of at most {LARGEST_SIZE:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that float32 holds."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not SMALLEST <= value <= LARGEST:  # false for NaN
            raise self.wrong(key, f"a positive number ({SMALLEST:g} to {LARGEST:g})")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; neither 1 nor "false" is one of them."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings; nothing where there is none."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def object(self, key: str) -> Fields:
        """A JSON object, an empty one where there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def wrong(self, key: str, wanted: str) -> ImportProblem:
        """The error for a value that is not what was `wanted`."""
        return ImportProblem(f"{self.where}: {key!r} is {quoted(self.text.get(key))}, not {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.text.get(key)
        value = default if value is None else value
        if value is None:
            raise ImportProblem(f"{self.where}: {key!r} is missing")
        return value
