"""How an answer is judged: METRICS maps a name to (prediction, answers) -> [0, 1].

Every metric takes the best over the gold answers, is pure, never raises on what a policy
may write, and looks at no more than `LONGEST` characters, so hostile text costs bounded
time. `boxed` is the training reward of memory agents (docs: the reward section); the
others are for evaluation, normalised as SQuAD's script does (lower case, no punctuation,
no articles). Used by rollout.rewards and eval; imports nothing of ours.
"""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence

LONGEST = 20_000  # characters of a prediction that are looked at, counted from its end
BOXED_WINDOW = 300  # characters at the end of a prediction where the box must stand

Metric = Callable[[str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LATEX_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{([^{}]*)\}")
_LATEX_NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s+")


def em(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction, stripped, is exactly a gold answer."""
    said = prediction[-LONGEST:].strip()
    return float(any(said == gold.strip() for gold in answers))


def normalised_em(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer after SQuAD normalisation."""
    said = normalise(prediction[-LONGEST:])
    return float(any(said == normalise(gold) for gold in answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of normalised words, counted with multiplicity, as in SQuAD."""
    said = collections.Counter(normalise(prediction[-LONGEST:]).split())
    return max(_f1(said, collections.Counter(normalise(gold).split())) for gold in answers)


def sub_em(prediction: str, answers: Sequence[str]) -> float:
    """1 if a gold answer stands in the prediction as whole words ("no" is not in "Nokia").

    One way only, both sides normalised; a gold answer of nothing matches nothing.
    """
    said = normalise(prediction[-LONGEST:])
    return float(any(_stands_in(normalise(gold), said) for gold in answers))


def sub_em_two_way(prediction: str, answers: Sequence[str]) -> float:
    """MemAgent's headline metric, for comparison only: either string contains the other.

    It is far too kind ("no" matches "Nokia", an empty prediction matches everything).
    """
    said = _squad(prediction[-LONGEST:])
    return float(any(_squad(gold) in said or said in _squad(gold) for gold in answers))


def boxed(prediction: str, answers: Sequence[str]) -> float:
    r"""1 if the last `\boxed{...}` of the last 300 characters equals a gold answer.

    Braces are matched; an unclosed last box scores 0. Compared without case, spaces and
    a few LaTeX spellings, on both sides.
    """
    content = _last_box(prediction[-BOXED_WINDOW:])
    if content is None:
        return 0.0
    said = _plain_latex(content)
    return float(bool(said) and any(said == _plain_latex(gold) for gold in answers))


METRICS: Mapping[str, Metric] = {
    "em": em,
    "normalised_em": normalised_em,
    "token_f1": token_f1,
    "sub_em": sub_em,
    "sub_em_two_way": sub_em_two_way,
    "boxed": boxed,
}


def metric(name: str) -> Metric:
    """Returns METRICS[name]; ValueError naming the known ones."""
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; use one of {', '.join(METRICS)}")
    return METRICS[name]


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share: honest at 0, at n and for small n.

    Wilson (1927), score interval without continuity correction; (0, 1) for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is no share; need 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    z2 = 1.959963984540054**2
    share = successes / n
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(share * (1 - share) / n * z2 + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def normalise(text: str) -> str:
    """SQuAD's normalisation; text that would vanish ("The", "?") only loses its case."""
    return _squad(text) or text.strip().lower()


def _squad(text: str) -> str:
    words = _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION))
    return " ".join(words.split())


def _f1(said: collections.Counter[str], gold: collections.Counter[str]) -> float:
    common = (said & gold).total()
    if not common:
        return 0.0
    return 2 * common / (said.total() + gold.total())


def _stands_in(gold: str, said: str) -> bool:
    """Whether gold occurs in said with no ASCII letter or digit glued to either end."""
    at = said.find(gold) if gold else -1
    while at >= 0:
        end = at + len(gold)
        before, after = said[max(0, at - 1) : at], said[end : end + 1]
        if not _glues(before) and not _glues(after):
            return True
        at = said.find(gold, at + 1)
    return False


def _glues(character: str) -> bool:
    return character.isascii() and character.isalnum()  # false for "", the text's edge


def _last_box(text: str) -> str | None:
    opening = "\\boxed{"
    start = text.rfind(opening)
    if start < 0:
        return None
    start += len(opening)
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _plain_latex(text: str) -> str:
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _LATEX_WRAPPER.sub(r"\1", text).replace("\\%", "%")
    return _LATEX_NOISE.sub("", text).lower()
