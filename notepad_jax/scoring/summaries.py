"""The metric of summaries: ROUGE-L, the longest common subsequence of words.

Lin (2004), section 3: F1 of LCS / |prediction| and LCS / |reference|. On ASCII text it is
`rouge-score`'s `rougeL` without stemming, word for word (the oracle in the tests); beyond
ASCII words are words too, of any script, and scripts written without spaces count by
the character. Used by metrics; imports nothing of ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_ASCII_WORD = re.compile(r"[a-z0-9]+")
# Thai and Lao, Burmese, Khmer, kana, Han
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the references; 0 where a side has no words."""
    said = words(prediction)
    return max(_f1(said, words(gold)) for gold in answers)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case: runs of letters, marks and digits."""
    text = text.lower()
    if text.isascii():
        return _ASCII_WORD.findall(text)
    text = unicodedata.normalize("NFC", text)
    spaced = "".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return _SPACELESS.sub(lambda found: f" {found[0]} ", spaced).split()


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence of two lists of words.

    Bit-parallel (Hyyrö 2004): the column of the usual table as one integer of |a| bits,
    in which a zero says that the length grows there; |b| additions of such integers.
    """
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    everything = (1 << len(a)) - 1
    column = everything
    for word in b:
        here = column & places.get(word, 0)
        if here:
            column = ((column + here) | (column - here)) & everything
    return len(a) - column.bit_count()


def _f1(said: Sequence[str], gold: Sequence[str]) -> float:
    if not said or not gold:
        return 0.0
    return 2 * common_subsequence(gold, said) / (len(said) + len(gold))
