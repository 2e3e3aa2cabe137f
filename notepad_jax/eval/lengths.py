"""Lengths as people write them: 512, 8k, 3.5m. Used by programs and report."""

from __future__ import annotations

import re

_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Returns tokens: "512", "8k" = 8,192, "3.5m" = 3,670,016 (k is 1,024, m is k * k).

    So are the published lengths (7K, 14K, ..., 896K, 1.75M, 3.5M) doublings of each other.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no length; write tokens as 512, 8k or 3.5m")
    length = round(float(match[1]) * _SUFFIX[match[2].lower()])
    if length < 1:
        raise ValueError(f"a length of {text!r} is less than one token")
    return length


def format_length(length: int) -> str:
    """Returns "512", "8K", "3.5M": in 1,024s or 1,000s, whichever is the shorter to read."""
    if length < 1000:
        return str(length)
    return min((_with_suffix(length, base) for base in (1024, 1000)), key=len)


def _with_suffix(length: int, base: int) -> str:
    million = length >= 0.9995 * base**2
    value = length / (base**2 if million else base)
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    number = f"{value:.{digits}f}"
    return (number.rstrip("0").rstrip(".") if "." in number else number) + "KM"[million]
