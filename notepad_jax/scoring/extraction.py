r"""Extraction of the answer from a completion: CONTRACTS maps a name to how it is found.

A task says by which sign its question asked for the answer (`Task.contract`), and nothing
else of the completion is judged. Thinking goes first: everything up to the last
`</think>` is dropped whatever the contract, so a sign written while thinking never counts,
and thinking that never ends (`<think>` with no `</think>` behind it) has given no answer.
Where the prompt itself opened the thinking, a completion cut before `</think>` cannot be
told from an answer; ask such models by a contract with a sign.

The last opening of a sign is the one that counts, also when it was not closed: `\boxed{a}`
followed by a cut `\boxed{b` is no answer, not `a`. Above: metrics, which raise Malformed
from here. Imports nothing of ours.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Mapping

LONGEST = 50_000  # characters of an answer, about 12 thousand tokens; a longer one is none

DEEPEST = 8  # LaTeX wrappers within each other that are taken off
LATEX = ("boxed", "auto", "signed")  # contracts whose answers are written in LaTeX, or may be
_BOX = "\\boxed{"
_TAG, _TAG_END = "<answer>", "</answer>"
_STATED = "the answer is"  # what published memory agents are asked to end with
_MARKERS = ("[Answer]", "[答案]")  # the second in the Chinese half of LongBench Pro
_BRACE = re.compile(r"[{}]")
_WRAPPER = re.compile(
    r"(?<!\\)\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|mbox|emph)\s?\{([^{}]*)\}"
)


class Malformed(Exception):
    """Raised by a metric for what is no answer of its kind; caught and counted by `score`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # short, of a small fixed set: it becomes a counter's name


@dataclasses.dataclass(frozen=True)
class Extracted:
    """An extracted answer, or why there is none."""

    answer: str | None
    problem: str = ""  # empty where there is an answer


def extract(text: str, contract: str) -> Extracted:
    """Returns the answer that stands in `text`; ValueError for an unknown contract.

    Linear in the length of the text, whatever it holds. Problems: `unclosed_thinking`,
    `no_box`, `unclosed_box`, `no_tag`, `unclosed_tag`, `no_marker`, `no_sign`, and
    `too_long` for an answer of more than LONGEST characters.
    """
    if contract not in CONTRACTS:
        raise ValueError(f"there is no contract {contract!r}; use one of {', '.join(CONTRACTS)}")
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        return Extracted(None, "unclosed_thinking")
    found = CONTRACTS[contract](said)
    if found.answer is not None and contract in LATEX:
        found = Extracted(unwrapped(found.answer[: LONGEST + 1]))
    if found.answer is not None and len(found.answer) > LONGEST:
        return Extracted(None, "too_long")
    return found


def composed(text: str) -> str:
    """Returns a text in NFC: an accent may be written on its own."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def plain(said: str) -> Extracted:
    """Returns all of it, as it is."""
    return Extracted(said)


def boxed(said: str) -> Extracted:
    r"""The content of the last `\boxed{...}`, its braces matched."""
    start = said.rfind(_BOX)
    if start < 0:
        return Extracted(None, "no_box")
    start += len(_BOX)
    depth = 1
    for brace in _BRACE.finditer(said, start, start + LONGEST + 1):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return Extracted(said[start : brace.start()])
    return Extracted(None, "unclosed_box")


def unwrapped(text: str) -> str:
    r"""The text without the LaTeX around words: `\text{Ann}` is `Ann`; nested ones, too."""
    for _ in range(DEEPEST):
        before, text = text, _WRAPPER.sub(r"\1", text)
        if text == before:
            break
    return text


def tag(said: str) -> Extracted:
    """The content of the last `<answer>...</answer>`."""
    start = said.rfind(_TAG)
    if start < 0:
        return Extracted(None, "no_tag")
    start += len(_TAG)
    end = said.find(_TAG_END, start)
    return Extracted(None, "unclosed_tag") if end < 0 else Extracted(said[start:end])


def marker(said: str) -> Extracted:
    """The text after the last `[Answer]`."""
    start, length = max((said.rfind(sign), len(sign)) for sign in _MARKERS)
    return Extracted(None, "no_marker") if start < 0 else Extracted(said[start + length :])


def stated(said: str) -> Extracted:
    """The text after the last "the answer is", without asterisks and the full stop."""
    return Extracted(said.rpartition(_STATED)[2].replace("*", "").strip().strip(".").strip())


_SIGNS = {_BOX: boxed, _TAG: tag, **dict.fromkeys(_MARKERS, marker)}


def auto(said: str) -> Extracted:
    r"""By whichever sign stands last (so the box in `<answer>\boxed{5}</answer>`), else all."""
    return _by_the_last(_SIGNS, said) or plain(said)


def signed(said: str) -> Extracted:
    """As `auto`, where "the answer is" is a sign, too, and no sign is no answer."""
    return _by_the_last(_SIGNS | {_STATED: stated}, said) or Extracted(None, "no_sign")


def _by_the_last(signs: Mapping[str, Callable[[str], Extracted]], said: str) -> Extracted | None:
    last = max(signs, key=said.rfind)
    return signs[last](said) if last in said else None


CONTRACTS: Mapping[str, Callable[[str], Extracted]] = {
    "plain": plain,
    "auto": auto,
    "signed": signed,
    "boxed": boxed,
    "tag": tag,
    "marker": marker,
}
