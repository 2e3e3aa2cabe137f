"""Metrics of answers: `score` finds one in a completion and applies its task's metric.

METRICS maps a name to (prediction, answers) -> [0, 1]. For those of ALL_WANTED (lists, and
`ruler_all`) the answers are items, all of them wanted; for the others any answer is right
and the best one counts. Every metric is pure and deterministic, never
raises on what a policy may write, and looks at no more than the last `LONGEST` characters,
so hostile text costs bounded time: under a second, plus `symbolic.MAX_SECONDS` in a process
of its own for a formula. What is no answer of its kind (a broken table, no letter) is worth
0; called directly a metric says no more, while `score` names the reason, for counting.

`boxed` is our reading of the training reward of memory agents, the two `ruler` metrics are
RULER's, and `normalised_em`, `token_f1` and `sub_em` normalise as SQuAD's script does (lower
case, no punctuation, no articles). `memagent` and the `published_` metrics are what others
published, to the letter (`published`); they find the answer in their own way. The metrics of
`long_context.BABILONG` look at the question, too, and `graphwalks` at a last line. Below:
extraction, published, and one file for each kind of answer (lists, choices, tables, quantities,
summaries, long_context). Above: rollout.rewards, eval.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence

from notepad_jax.scoring import (
    choices,
    extraction,
    lists,
    long_context,
    published,
    quantities,
    summaries,
    tables,
)
from notepad_jax.scoring.extraction import LONGEST, Malformed

Metric = Callable[[str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LATEX_NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\s+")
_CONTROL = re.compile("[\x00-\x1f]")
_SILENCE = re.compile(r"[\s.*]*")  # what published evaluators take off before they look
_ALONE = frozenset({"yes", "no", "noanswer"})  # HotpotQA's: no part of another answer
# How a bare gold answer is said so that a metric finds it.
_SAYING = {
    "boxed": "\\boxed{%s}",
    "memagent": "\\boxed{%s}",
    "published_choice": "The correct answer is (%s)",
    "graphwalks": "Final Answer: [%s]",
}
_BETWEEN = {"graphwalks": ", "}  # gold answers that are said together; else a line break


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of an answer, and why a malformed one is worth nothing."""

    value: float  # in [0, 1]
    problem: str  # one of few short reasons, for counting; empty for a well-formed answer


def known() -> str:
    """Returns the names of all metrics as an error says them: families by their beginning."""
    families = ("published_", "babilong_")
    alone = [name for name in METRICS if not name.startswith(families)]
    return ", ".join([*alone, *(f"{family}..." for family in families)]) + " (docs/evaluation.md)"


def score(
    text: str, answers: Sequence[str], metric: str, contract: str, question: str = ""
) -> Score:
    """Scores a completion: the answer by `contract`, its worth by `metric`.

    The published metrics are shown the completion itself, its last LONGEST characters, and those
    of `long_context.BABILONG` the question; without it they take it for one that names no label.
    Raises ValueError for an unknown metric or contract, and for nothing in `text`.
    """
    if metric not in _JUDGES:
        raise ValueError(f"there is no metric {metric!r}; use one of {known()}")
    whole = metric in published.METRICS
    if metric == "boxed":  # it opens the box itself
        contract = "plain" if contract in extraction.CONTRACTS else contract
    found = extraction.extract("" if whole else text, contract)  # an unknown contract is named
    if whole:
        found = extraction.Extracted(text[-LONGEST:])
    elif found.answer is None:
        return Score(0.0, found.problem)
    elif contract in extraction.LATEX:  # both sides without \text{}, or neither
        answers = [extraction.unwrapped(gold) for gold in answers]
    asked = (question,) if metric in long_context.BABILONG else ()
    try:
        return Score(_JUDGES[metric](found.answer, answers, *asked), "")
    except Malformed as malformed:
        return Score(0.0, malformed.reason)


def check_gold(answers: Sequence[str], metric: str) -> None:
    """Raises ValueError unless gold answers are worth 1 by their own metric.

    For code that reads data: says which answer is at fault, not where it was read.
    """
    together = [_BETWEEN.get(metric, "\n").join(answers)]
    for answer in together if metric in ALL_WANTED else answers:
        said = _SAYING.get(metric, "%s") % answer
        worth = score(said, answers, metric, "plain")
        if worth.value < 1.0:
            raise ValueError(
                f"the gold answer {answer[:80]!r} is itself worth {worth.value:g} by metric "
                f"{metric!r}{f' ({worth.problem})' if worth.problem else ''}; mend one of them"
            )


def em(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction, stripped, is exactly a gold answer."""
    said = prediction.strip()
    return float(any(said == gold.strip() for gold in answers))


def normalised_em(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer after SQuAD normalisation."""
    said = normalise(prediction)
    return float(any(said == normalise(gold) for gold in answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of normalised words, counted with multiplicity, as in SQuAD.

    With HotpotQA's rule: yes, no and noanswer are worth something to themselves alone.
    """
    said = normalise(prediction)
    return max(_f1(said, normalise(gold)) for gold in answers)


def sub_em(prediction: str, answers: Sequence[str]) -> float:
    """1 if a gold answer stands in the prediction as whole words ("no" is not in "Nokia").

    One way only, both sides normalised; a gold answer of nothing matches nothing. One that
    normalising takes away ("A", "The") is looked for as it is written.
    """
    said = normalise(prediction)
    sought = map(needle, answers)
    return float(any(stands_in(words, said if bare else prediction) for words, bare in sought))


def sub_em_two_way(prediction: str, answers: Sequence[str]) -> float:
    """MemAgent's headline metric, for comparison only: either string contains the other.

    It is far too kind ("no" matches "Nokia", and "the" everything), but silence is worth 0:
    published evaluators count nothing where nothing was said.
    """
    if _SILENCE.fullmatch(prediction):
        return 0.0
    said = _squad(prediction)
    return float(any(_squad(gold) in said or said in _squad(gold) for gold in answers))


def boxed(prediction: str, answers: Sequence[str]) -> float:
    r"""1 if the last `\boxed{...}` of the last 300 characters equals a gold answer.

    Compared without case, spaces and a few LaTeX spellings, on both sides. Raises
    Malformed for no box and for an unclosed last one.
    """
    found = extraction.boxed(prediction[-published.WINDOW :])
    if found.answer is None:
        raise Malformed(found.problem)
    said = _plain_latex(found.answer)
    return float(bool(said) and any(said == _plain_latex(gold) for gold in answers))


def ruler_all(prediction: str, answers: Sequence[str]) -> float:
    """RULER's `string_match_all`: the share of gold strings that stand in the prediction.

    Without case; control characters of the prediction count as newlines, as in RULER's
    evaluation script.
    """
    said = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(gold.lower() in said for gold in answers) / len(answers)


def ruler_part(prediction: str, answers: Sequence[str]) -> float:
    """RULER's `string_match_part`: 1 if any gold string stands in the prediction."""
    return float(ruler_all(prediction, answers) > 0)


# As they are applied by `score`: these may raise Malformed.
_JUDGES: Mapping[str, Metric] = {
    "em": em,
    "normalised_em": normalised_em,
    "token_f1": token_f1,
    "sub_em": sub_em,
    "sub_em_two_way": sub_em_two_way,
    "boxed": boxed,
    "ruler_all": ruler_all,
    "ruler_part": ruler_part,
    "choice": choices.choice,
    "set_f1": lists.set_f1,
    "numeric": quantities.numeric,
    "row_iou": tables.row_iou,
    "sub_em_lines": lists.sub_em_lines,
    "ndcg": lists.ndcg,
    "pairwise": lists.pairwise,
    "rouge_l": summaries.rouge_l,
    "graphwalks": long_context.graphwalks,
    **long_context.BABILONG,
    "mrcr": long_context.mrcr,
    "oolong": long_context.oolong,
    "oolong_number": long_context.oolong_number,
    "oolong_date": long_context.oolong_date,
    "contains": long_context.contains,
    **published.METRICS,
}
ALL_WANTED = published.ALL_WANTED | {
    "ruler_all", "set_f1", "sub_em_lines", "ndcg", "pairwise", "graphwalks",
}  # fmt: skip


def _forgiving(judge: Metric) -> Metric:
    """The metric for direct calls: on the end of any text, malformed is 0."""

    @functools.wraps(judge)
    def metric(prediction: str, answers: Sequence[str]) -> float:
        try:
            return judge(prediction[-LONGEST:], answers)
        except Malformed:
            return 0.0

    return metric


METRICS: Mapping[str, Metric] = {name: _forgiving(judge) for name, judge in _JUDGES.items()}


def normalise(text: str) -> str:
    """SQuAD's normalisation; text that would vanish ("The", "?") only loses its case."""
    return _bare(text) or text.strip().lower()


def _bare(text: str) -> str:
    return _squad(extraction.composed(text))


def _squad(text: str) -> str:
    words = _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION))
    return " ".join(words.split())


def _f1(said: str, gold: str) -> float:
    if said != gold and not _ALONE.isdisjoint((said, gold)):
        return 0.0
    ours, theirs = collections.Counter(said.split()), collections.Counter(gold.split())
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def needle(gold: str) -> tuple[str, bool]:
    """Returns what is looked for of a gold answer, and whether in a normalised text."""
    bare = _bare(gold)
    return (bare, True) if bare else (gold.strip(), False)


def stands_in(gold: str, said: str) -> bool:
    """Whether gold occurs in said with no letter or digit of an alphabet glued to either end."""
    at = said.find(gold) if gold else -1
    while at >= 0:
        end = at + len(gold)
        before, after = said[max(0, at - 1) : at], said[end : end + 1]
        if not _glues(before) and not _glues(after):
            return True
        at = said.find(gold, at + 1)
    return False


def _glues(character: str) -> bool:
    # False for "", the text's edge. Latin, Greek and Cyrillic put spaces between words; where a
    # script does not, as Chinese, any place may be a word's end.
    return character.isalnum() and character < "\u0530"


def _plain_latex(text: str) -> str:
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = extraction.unwrapped(text).replace("\\%", "%")
    return _LATEX_NOISE.sub("", text).lower()
