r"""The metric of numeric answers: read exactly where that is possible, else as formulas.

The last line that is not blank is read, from its last "is" or `:` on, and of one equation
(x = 2 + 3 = 5) the last side. Read exactly, as fractions: 1,234.5 (thousands in threes), 6.02e23
and 6.02 \times 10^{23}, 3/4, 1 3/4, \frac{3}{4}, a currency sign before or after, a percent
sign, "million" and its like, and a unit of letters behind.

Integers must be equal; what either side writes with a decimal point, an exponent or a
fraction may differ by a millionth of the gold answer. A unit counts only where both sides
name one (without case and plural s). Where only one side says percent, 50% is right for
0.5 and for 50, as in math-verify. What cannot be read so goes to math-verify, in a process
of its own (`symbolic`). Used by metrics and tables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction

from notepad_jax.scoring import symbolic
from notepad_jax.scoring.extraction import Malformed

TOLERANCE = Fraction(1, 10**6)  # relative to the gold answer
LONGEST_LINE = 300  # characters of a quantity; the longest answer of MATH-500 has 159
MOST_EXPONENT = 400  # of ten; 64-bit floats end at 308

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_VARIABLES = frozenset("x y z n i e π pi xy yz xz xyz".split())  # no units, unlike m and s
_SAME = str.maketrans({"−": "-", "–": "-", "％": "%", "，": ",", "．": "."})
_THOUSANDS_GAP = re.compile(r"(?<=\d)(?:\\,|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_WRAPPER = re.compile(r"\\(?:text\w{0,2}|math(?:rm|bf|it|tt|sf)|boxed)\{([^{}]*)\}")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_NOISE = re.compile(r"\\[()\[\],;:! ]|\\(?:left|right)(?![a-z])|\\?\$|[€£¥₹`\"]")
_PROSE = re.compile(r"\bis\b|:(?!\S)")
_SIDES = re.compile(r"(?<![<>!])=|≈|\\approx")
_SEVERAL = re.compile(r"[;]|,(?!\d{3})|\b(?:and|or)\b")

_NUMBER = re.compile(
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<decimals>\.\d*)?"
    r"(?:[eE](?P<e>[+-]?\d{1,4})(?!\d)"
    r"|\s?(?:[×x·⋅*]|\\times|\\cdot)\s?10\s?\^\s?\{?(?P<power>[+-]?\d{1,4})\}?(?!\d))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_RATIO = re.compile(r"(?:(?P<whole>\d+)\s+)?(?P<over>\d+)\s?/\s?(?P<under>\d+)")
_UNIT = re.compile(r"\s?(?:[^\W\d_]|°)(?:[^\W\d_]|[\s./·²³-]|\^\{?[23]\}?)*")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A parsed number, with its unit, as it was written."""

    value: Fraction  # of "50%": 50
    integer: bool  # written as one
    percent: bool
    unit: str  # folded; empty if none was written


def numeric(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is a gold quantity, or a formula equal to a gold one.

    Raises Malformed: `no_number` for what is neither, `too_long` for a line of more than
    300 characters, and `symbolic`'s reasons. Formulas cost the time that `symbolic` allows.
    """
    text, golds = _line(prediction), [_line(gold) for gold in answers]
    if len(text) > LONGEST_LINE:
        raise Malformed("too_long")
    if text and text in golds:
        return 1.0
    said = read(text)
    undecided = []
    for gold in golds:
        quantity = read(gold)
        if said is None or quantity is None:
            undecided.append(gold)
        elif equal(said, quantity):
            return 1.0
    if said is None and not symbolic.formula(text):
        raise Malformed("no_number")
    formulas = [gold for gold in undecided if symbolic.formula(gold)]
    return float(symbolic.equal(text, formulas)) if formulas else 0.0


def read(text: str) -> Quantity | None:
    """Returns the quantity that is all of `text` (a cleaned line); None if it is none."""
    sign = -1 if text.startswith("-") else 1
    text = _FRACTION.sub(r" \1/\2", text).removeprefix("-").removeprefix("+").strip()
    found = _RATIO.match(text)
    value = _ratio(found) if found else _decimal(found := _NUMBER.match(text))
    if value is None:
        return None
    written, rest = text[: found.end()], text[found.end() :]
    integer = written.replace(",", "").isdigit()
    percent = re.match(r"\s?(?:%|percent\b)", rest)
    rest = rest[percent.end() :] if percent else rest
    word, _, behind = rest.strip().partition(" ")
    if word.lower() in _SCALES:
        value, integer, rest = value * _SCALES[word.lower()], False, " " + behind
    unit = _unit(rest)
    if unit is None:
        return None
    return Quantity(sign * value, integer, percent is not None, unit)


def number(text: str) -> Fraction | None:
    """Returns the value of a bare number: a sign, thousands, decimals, an exponent."""
    if len(text) > LONGEST_LINE:
        return None
    found = _NUMBER.fullmatch(text.removeprefix("-"))
    value = _decimal(found) if found else None
    return -value if value is not None and text.startswith("-") else value


def equal(said: Quantity, gold: Quantity) -> bool:
    """Whether two quantities are the same, by the rules at the top of this file."""
    if said.unit and gold.unit and said.unit != gold.unit:
        return False
    if said.percent == gold.percent:
        if said.integer and gold.integer:
            return said.value == gold.value
        return _near(said.value, gold.value)
    scaled = said.value / 100 if said.percent else said.value
    target = gold.value / 100 if gold.percent else gold.value
    return _near(scaled, target) or _near(said.value, gold.value)


def _near(said: Fraction, gold: Fraction) -> bool:
    return abs(said - gold) <= TOLERANCE * abs(gold)


def _line(text: str) -> str:
    """Returns the last line that is not blank, without decoration and lead-in."""
    line = text.strip().rpartition("\n")[2]
    if len(line) > LONGEST_LINE:
        return line
    line = _THOUSANDS_GAP.sub(",", line.translate(_SAME)).replace("\\%", "%")
    line = _NOISE.sub(" ", _WRAPPER.sub(r" \1 ", _BOLD.sub(r"\1", line)))
    line = _PROSE.split(line)[-1]
    if not _SEVERAL.search(line):  # x = 5, but of x = 3, y = 5 nothing is dropped
        line = _SIDES.split(line)[-1]
    line = line.strip().rstrip(".,;").strip("*' ").replace("**", "^")
    return " ".join(line.rstrip(".,;").split())


def _decimal(found: re.Match[str]) -> Fraction | None:
    whole, decimals = found["whole"] or "", (found["decimals"] or "")[1:]
    if not whole and not decimals:
        return None
    digits = Fraction(int(whole.replace(",", "") + decimals), 10 ** len(decimals))
    exponent = int(found["e"] or found["power"] or 0)
    return digits * Fraction(10) ** exponent if abs(exponent) <= MOST_EXPONENT else None


def _ratio(found: re.Match[str]) -> Fraction | None:
    under = int(found["under"])
    return int(found["whole"] or 0) + Fraction(int(found["over"]), under) if under else None


def _unit(rest: str) -> str | None:
    """Returns the unit that `rest` is, folded; None if it is something else, as in 5x or 5 - x."""
    name = " ".join(rest.lower().split()).removesuffix(".")
    if not name:
        return ""
    glued_letter = not rest[0].isspace() and len(name) < 2 and name != "°"
    letters = set(re.findall(r"[^\W\d_]+", name))
    if glued_letter or letters & _VARIABLES or not _UNIT.fullmatch(rest):
        return None
    return name.removesuffix("s") or name
