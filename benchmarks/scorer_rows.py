"""The published scorers that ours are compared with, a row each: which file, which functions.

- babilong: babilong/metrics.py of booydar/babilong
- graphwalks: resources_servers/graphwalks/app.py of NVIDIA-NeMo/Gym, which ports the grading of
  the data set's card
- mrcr: any file with the card's `grade`, such as nemo_skills/evaluation/evaluator/mrcr.py of
  NVIDIA/NeMo-Skills
- oolong: src/eval/eval_helpers.py of abertsch72/oolong; its dates need python-dateutil
- nolima: evaluation/async_evaluate.py of adobe-research/NoLiMa
- memory_agent_bench: utils/eval_other_utils.py of HUST-AI-HYZ/MemoryAgentBench

Above: scorers; below: published and the project.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import importlib
import re
import string
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import Case, Judge, Scorer, count, functions, never, one_of
from notepad_jax.data.foreign import memory_agent_bench
from notepad_jax.data.rows import Row
from notepad_jax.scoring import long_context
from notepad_jax.tasks import babilong, graphwalks, haystack, mrcr, nolima, oolong
from notepad_jax.types import Task, TextDocument

# ---------------------------------------------------------------- BABILong


def _babilong(path: Path) -> Judge:
    found = functions(path, ("TASK_LABELS", "preprocess_output", "compare_answers"))

    def judge(case: Case) -> float:
        name = case.task.source.rpartition("/")[2]
        question = case.task.question.partition("?")[0] + "?"  # what stands behind it is ours
        known = found["TASK_LABELS"][name]
        return float(found["compare_answers"](case.task.answers[0], case.said, question, known))

    return judge


def _about_labels(rng: np.random.Generator, task: Task) -> str:
    gold, known = task.answers[0], long_context.LABELS[task.metric]
    asked = task.question.partition("?")[0]
    words = [*known, *known, *known, *gold.split(","), "Mary", "I know", "is in the", "or", "none"]
    ends = [".", ". ", "\n", "<context>", "<example>", "Question", "?", "\x00", "É"]
    picked = rng.choice([*words, *ends, asked], int(rng.integers(6))).tolist()
    forms = ["", gold, gold.upper(), gold.replace(",", " and "), f"{asked}: {gold}", *picked[:1]]
    return one_of(rng, [*forms, " ".join(picked), f"{gold} {' '.join(picked)}"])


def _says_none(case: Case) -> bool:
    """A label within another one: "none" alone is not "one"."""
    return case.task.metric == "babilong_numbers" and "none" in case.said.lower()


# ---------------------------------------------------------------- GraphWalks


def _graphwalks(path: Path) -> Judge:
    found = functions(path, ("_FINAL_ANSWER_RE", "_parse_node_list", "_f1_score"))

    def judge(case: Case) -> float:
        said, failed = found["_parse_node_list"](case.said)
        return found["_f1_score"](set(said), {*case.task.answers} - {long_context.EMPTY}, failed)

    return judge


def _about_nodes(rng: np.random.Generator, task: Task) -> str:
    gold = [node for node in task.answers if node != long_context.EMPTY]
    others = ["0123456789", "abcdefabcd", "", " ", "'", "]", "[", "[]"]
    picked = [node for node in gold if rng.random() < 0.7]
    picked += rng.choice(others, int(rng.integers(3))).tolist()
    listed = one_of(rng, [", ", ",", " , "]).join(rng.permutation(picked).tolist())
    sign = one_of(
        rng, ["Final Answer: [", "Final Answer:[", "Final Answer:  [", "final answer: [", "["]
    )
    before = one_of(rng, ["", "I searched.\n", "Final Answer: []\n", "so "])
    behind = one_of(rng, ["]", "]", "]\n", "] ", "].", "", "]\nThat is all."])
    return one_of(rng, ["", before + sign + listed + behind, before + sign + listed + "]"])


def _empty_item(case: Case) -> bool:
    """An item "[]" is no item."""
    return bool(re.search(r"[\[,]\s*\[\]\s*[\],]", case.said))


# ---------------------------------------------------------------- MRCR


def _mrcr(path: Path) -> Judge:
    grade = functions(path, ("grade",), {"SequenceMatcher": difflib.SequenceMatcher})["grade"]

    def judge(case: Case) -> float:
        gold = case.task.answers[0]
        return float(grade(case.said, gold, gold[: long_context.PREFIX]))

    return judge


def _about_texts(rng: np.random.Generator, task: Task) -> str:
    gold = task.answers[0]
    prefix, rest = gold[: long_context.PREFIX], gold[long_context.PREFIX :]
    sentences = re.findall(r"[^.!?]+[.!?] ?", rest)
    kept = [one for one in sentences if rng.random() < 0.8]
    shuffled = rng.permutation(sentences).tolist()
    bodies = [
        rest, "".join(kept), "".join(shuffled), rest[: rng.integers(len(rest))], "", rest * 2,
        rest * 15, rest.upper(), "No such text.", rest[::-1], f" {rest}", f"{rest}\n",
    ]  # fmt: skip
    starts = [
        *[prefix] * 6, "", prefix[:-1], prefix.lower(), f"\n{prefix}", f" {prefix}", "Sure: ",
        prefix * 2, f"{prefix} ", f"{prefix}\n\n", f"**{prefix}**",
    ]  # fmt: skip
    return one_of(rng, starts) + one_of(rng, bodies)


def _leads_or_is_far_too_long(case: Case) -> bool:
    """White space before the prefix, and answers more than ten times as long."""
    longest = long_context.FAR_TOO_LONG * len(case.task.answers[0])
    return case.said != case.said.lstrip() or len(case.said) > longest


# ---------------------------------------------------------------- OOLONG

_OTHER_DAYS = ((2001, 1, 1), (2002, 2, 2))  # no part of a date in common
_TYPES = {"oolong_number": "NUMERIC", "oolong_date": "DATE", "oolong": "LABEL"}


def _oolong(path: Path) -> Judge:
    try:
        importlib.import_module("dateutil.parser")
    except ImportError:
        raise ValueError(f"{path} reads dates with python-dateutil; install it") from None
    sees = {
        "ast": ast, "datetime": datetime.datetime, "dateutil": importlib.import_module("dateutil")
    }  # fmt: skip
    names = ("synth_attempt_answer_parse", "synth_process_response")
    process = functions(path, names, sees)["synth_process_response"]

    def judge(case: Case) -> float:
        kind = f"ANSWER_TYPE.{_TYPES[case.task.metric]}"
        row = {"answer": _written(case.task), "answer_type": kind}
        try:
            nothing = {"id": 0, "context_window_id": 0, "dataset": ""}
            return float(process(row | nothing, case.said, "")["score"])
        except IndexError:  # nothing but white space
            return 0.0

    return judge


def _written(task: Task) -> str:
    """A gold answer as the data set has it."""
    if task.metric != "oolong_date":
        return repr([task.answers[0]])
    day = datetime.datetime.strptime(task.answers[0], "%b %d, %Y")
    return f"[datetime.date({day.year}, {day.month}, {day.day})]"


def _about_counts(rng: np.random.Generator, task: Task) -> str:
    gold = task.answers[0]
    said = one_of(rng, [
        gold, gold, *_near(rng, task), "food", "more common", "", "  ", "the same frequency",
        "it is less common than sport", "31", "Mar 4", gold.lower(), f"{gold}.", f"**{gold}**",
        f"[{gold}]", f" {gold} ", f"'{gold}'", f"\n{gold}\n", "not to be told from the messages",
    ])  # fmt: skip
    form = one_of(rng, [
        "Answer: {}", "Label: {}", "User: {}", "{}", "**Answer:** {}", "{}:", "Date: {}",
        "I counted: 3.\nAnswer: {}", "Answer : {}", "Answer:{}", "It must be {}",
        "Having counted them all I say {}", "Answer: {}\n",
    ])  # fmt: skip
    return form.format(said)


def _near(rng: np.random.Generator, task: Task) -> Sequence[str]:
    gold = task.answers[0]
    if task.metric == "oolong_number":
        off = int(gold) + int(rng.integers(-5, 6))
        return [str(off), f"{off:+}", f"{off:,}", f"{off}.0", "9" * 400, "9" * 5000, f"0{off}"]
    if task.metric == "oolong_date":
        day = datetime.datetime.strptime(gold, "%b %d, %Y")
        forms = (
            "%Y-%m-%d", "%B %d, %Y", "%d %B %Y", "%d %b %Y", "%m/%d/%Y", "%Y/%m/%d", "%b %d %Y",
            "%A, %B %d, %Y", "%d.%m.%Y", "%B %Y", "%m-%d-%Y", "%Y%m%d", "%d-%b-%Y",
        )  # fmt: skip
        return [f"{day:{form}}" for form in forms]
    return [f"{gold} than", f"food is {gold} than sport", gold.title(), gold.upper()]


def _is_no_whole_date(case: Case) -> bool:
    """A date without its day, month or year, which dateutil fills in from today."""
    if case.task.metric != "oolong_date":
        return False
    parse = importlib.import_module("dateutil.parser").parse
    said = long_context._after_the_colon(case.said)
    try:
        first, other = (parse(said, default=datetime.datetime(*day)) for day in _OTHER_DAYS)
    except (ValueError, OverflowError):
        return False
    return first != other


# ---------------------------------------------------------------- NoLiMa


def _nolima(path: Path) -> Judge:
    evaluate = functions(path, ("_evaluate_response",))["_evaluate_response"]
    asked = types.SimpleNamespace(metric="contains", gold_answers="")
    return lambda case: float(evaluate(asked, case.said, gold_answers=[*case.task.answers]))


def _about_people(rng: np.random.Generator, task: Task) -> str:
    gold = task.answers[0]
    return one_of(rng, [
        gold, f"It is {gold}.", gold.lower(), gold.upper(), f"{gold}s", f"**{gold}**", "Ada", "",
        gold[:-1], f"{gold[:2]} {gold[2:]}", f"{gold}\n", f"Ada, {gold} or Otto", "nobody",
    ])  # fmt: skip


# ---------------------------------------------------------------- MemoryAgentBench

_GOLD = (["43"], ["The Old Mill", "a mill"], ["no"], ["New York, U.S."], ["C. The answer: none"])
_JUDGED = {"published_memory_em": "exact_match", "published_memory_sub_em": "substring_exact_match"}


def _memory_agent_bench(path: Path) -> Judge:
    names = (
        "normalize_answer", "f1_score", "drqa_exact_match_score", "substring_exact_match_score",
        "drqa_metric_max_over_ground_truths", "parse_output", "calculate_metrics", "post_process",
        "_process_icl_dataset", "_process_eventqa_dataset", "_process_ruler_memory_merging_dataset",
        "_process_infbench_longmemeval_dataset", "default_post_process",
    )  # fmt: skip
    rouge = types.SimpleNamespace(rouge_types=(), score=lambda **texts: {})
    sees = {"string": string, "Counter": Counter, "rouge_scorer_instance": rouge}
    judged = functions(path, names, sees)["post_process"]

    def judge(case: Case) -> float:
        source = {"sub_dataset": case.task.source.rpartition("/")[2]}
        values, _ = judged({"output": case.said}, [*case.task.answers], source)
        return float(values[_JUDGED[case.task.metric.removesuffix("_line")]])

    return judge


def _memory_task(name: str, seed: int) -> Task:
    gold = _GOLD[seed % len(_GOLD)]
    columns = {"questions": ["?"], "answers": [gold], "metadata": {"source": f"{name}_1"}}
    ((task, _),) = memory_agent_bench.tasks_of(Row(1, columns, TextDocument("-")), "row 1", "m:1")
    return task


def _about_gold(rng: np.random.Generator, task: Task) -> str:
    gold = one_of(rng, task.answers)
    forms = [gold, gold.lower(), f"the {gold}!", f"{gold}s", gold[1:], "", "an", f"It is {gold}."]
    starts = ["", "", "\n", "Answer: ", "answer:answer: ", "I think.\nANSWER:", "label: ", " "]
    return (
        one_of(rng, starts) + one_of(rng, forms) + one_of(rng, ["", "\n", "\nor not", f"\n{gold}"])
    )


def _made(
    opened: Callable[[Path], Judge], module: Any, size: int, said: Any, meant: Any = never
) -> Scorer:
    """A row about a suite of ours, whose documents of `size` tokens are never read."""

    def task(name: str, seed: int) -> Task:
        return module.make_task(name, seed, size, haystack.noise(), count)

    return Scorer(opened, module.NAMES, task, said, meant)


SCORERS: Mapping[str, Scorer] = {
    "babilong": _made(_babilong, babilong, 400, _about_labels, _says_none),
    "graphwalks": _made(_graphwalks, graphwalks, 800, _about_nodes, _empty_item),
    "mrcr": _made(_mrcr, mrcr, 2000, _about_texts, _leads_or_is_far_too_long),
    "oolong": _made(_oolong, oolong, 2000, _about_counts, _is_no_whole_date),
    "nolima": _made(_nolima, nolima, 2000, _about_people),
    "memory_agent_bench": Scorer(
        _memory_agent_bench,
        [name for name, kind in memory_agent_bench.KINDS.items() if kind.metric != "rouge_l"],
        _memory_task, _about_gold, never,
    ),
}  # fmt: skip
