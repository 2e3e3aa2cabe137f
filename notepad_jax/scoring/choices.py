"""The metric of multiple choice: which letter was chosen.

`The correct answer is (B)`, `b`, `B) Paris`, `**C**` and `\\text{D}` all choose. The
strongest kind of statement decides, and among equals the last: a letter that is all of
the answer; then a letter named as the answer; then one named as an option; then one set
off by brackets or at the beginning of a line; then a capital that stands alone, unless it
is the article "A", the pronoun "I" or follows "not". Used by metrics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from notepad_jax.scoring.extraction import Malformed

_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[*_$`{}]")
_ALONE = re.compile(r"""[\s(\["']*([A-Za-z])[\s)\]"'.:]*""")
_SAID = (  # the letter behind such words; bounded repeats, so linear time
    r"(?i: is| would be| must be)?[ :=]{0,3}"
    r"(?!I [a-z])(?:[\[\"']?([A-Z])|[\[(]([A-Za-z])[\])])(?![\w'’])"
)
_KINDS = (
    # "the answer is B", "the answer is b."
    re.compile(
        r"\b(?i:answer|choose|select|pick|choice(?= is))(?:"
        + _SAID
        + r"|(?i: is|:) ?([b-z])(?=[.)]?(?:\s|\Z)))"
    ),
    re.compile(r"\b(?i:option|choice)" + _SAID),  # "Option: (c)"
    re.compile(r"(?:\(([A-Z])\)|^ ?\[?([A-Z])[.):\]])(?!\w)", re.MULTILINE),
    # "A is the correct answer": no article, whatever follows.
    re.compile(
        r"(?<![\w'’-])(?<!\bnot )([A-HJ-Z]) (?:is|was|would be) (?:the )?"
        r"(?:correct|right|best|true)\b"
    ),
    re.compile(r"(?<![\w'’-])(?<!\bnot )(?:A(?! [a-z])|[B-HJ-Z])(?![\w'’-])"),
)


def choice(prediction: str, answers: Sequence[str]) -> float:
    """1 if the letter chosen is a gold one; a gold answer may be any statement of a letter.

    Raises Malformed("no_letter") if none is chosen.
    """
    said = _letter(prediction)
    if not said:
        raise Malformed("no_letter")
    return float(any(said == _letter(gold) for gold in answers))


def _letter(text: str) -> str:
    """Returns the letter chosen, in upper case; empty if there is none."""
    lines = (" ".join(line.split()) for line in _DECORATION.sub("", text).split("\n"))
    text = "\n".join(lines)
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    for kind in _KINDS:
        stated = [next(filter(None, (*m.groups(), m[0]))) for m in kind.finditer(text)]
        if stated:
            return stated[-1].upper()
    return ""
