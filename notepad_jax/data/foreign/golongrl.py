"""GoLongRL's training rows (23 thousand, nine kinds of task), made into our tasks.

The published rows are {"data_source", "prompt" (chat messages), "reward_model":
{"ground_truth"}, "extra_info": {"reward_mode", "question", ...}}, as jsonl or parquet. What
judges a row is named by its data_source where that is a kind of reward ("selection",
"EM", ...), else by its reward_mode: a LongBench Pro task ("T5.1 Full-Sentence Citation
Alignment"), a metric of theirs, or one of ours. The ground truth is a text, a list, or an
object with a list `doc_ids` (for rewards over lists) and a text `golden_label` (for the
others); of a list of such objects the last counts, as in their trainer.

The user's messages are one text. The question is found in it (where it stands last), and
the longer of the two sides is the document; what stands on the other side, usually how to
answer, stays with the question, and so do system messages, in front. Where the question is
not found word for word, the whole text is the document. Below: tables. Above: programs.build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.data import admission, tables
from notepad_jax.data.admission import CONTRACT, METRIC, NO_GOLD, NO_TEXT, Fault, OnFault
from notepad_jax.scoring.extraction import CONTRACTS
from notepad_jax.types import Task, TextDocument

LISTS = ("set_f1", "sub_em_lines", "ndcg", "pairwise")  # metrics whose answers are items
_ACCURACY = "accuracy"  # theirs: a letter, or a first line that is the same but for case

# Rewards by the name they go by, lower case: ours (docs of the nine task types), theirs.
METRIC_OF: Mapping[str, str] = {
    "em": "em",
    "choice": "choice",
    "set_f1": "set_f1",
    "numeric": "numeric",
    "row_iou": "row_iou",
    "sub_em": "sub_em_lines",
    "ndcg": "ndcg",
    "pairwise": "pairwise",
    "rouge_l": "rouge_l",
    "selection": "choice",
    "accuracy": _ACCURACY,
    "f1_score": "set_f1",
    "math_verify": "numeric",
    "math_longcot_math_verify": "numeric",
    "iou": "row_iou",
    "multitableqa_pretraining": "row_iou",
    "subem": "sub_em_lines",
    "pairwise_accuracy": "pairwise",
    "summary": "rouge_l",
}
_DECIDES = re.compile(r"selection$|em$|multitableqa_pretraining$|.*(math_longcot_math_verify)")
# LongBench Pro's tasks by number, as GoLongRL's trainer scores them.
_LONGBENCH_PRO = {
    "ndcg": ("1.1", "1.2"),
    "pairwise": ("2.1", "2.2", "6.3"),
    _ACCURACY: ("3.1", "3.2", "11.1", "11.2"),
    "rouge_l": ("4.1", "4.2"),
    "set_f1": ("5.1", "5.2", "6.2", "7.1", "7.2", "7.3", "9.1", "9.2"),
    "sub_em_lines": ("6.1", "8.1", "8.2", "8.3", "10.1", "10.2"),
}
_TASK = re.compile(r"t(\d+\.\d+)\b")


def read(path: str | Path, on_fault: OnFault = admission.refuse) -> Iterator[Task]:
    """Yields the tasks of a .jsonl, .json or .parquet file, one row in memory at a time.

    `on_fault` is told of rows with a column that is missing or stands twice, an unknown reward, no
    gold answer, an empty document. Raises ValueError naming file and row for a file cut short.
    """
    for number, row in tables.rows(path, on_fault):
        stem = Path(str(path)).stem
        try:
            task = task_of(row, f"golongrl-{stem}-{number}", f"{path} row {number}")
        except Fault as fault:
            on_fault(fault)
            continue
        yield task


def task_of(row: Mapping[str, Any], name: str, where: str) -> Task:
    """Makes the task `name` (its id) of a row; Fault says what is wrong with it."""
    data_source = _text(row.get("data_source"), "data_source", where)
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping):
        raise Fault(f"{where} has no object 'extra_info'")
    truth = row.get("reward_model")
    truth = truth.get("ground_truth") if isinstance(truth, Mapping) else None
    answers, metric = _gold(truth, _metric(data_source, extra, where), where)
    document, question = _split(row.get("prompt"), extra, where)
    contract = extra.get("contract") or "auto"
    if contract not in CONTRACTS:
        raise Fault(
            f"{where}: contract {contract!r:.40} is none of {', '.join(CONTRACTS)}", CONTRACT
        )
    return Task(
        id=name,
        question=question,
        document=TextDocument(document),
        answers=answers,
        source=f"golongrl/{data_source}",
        metric=metric,
        contract=contract,
    )


# ---------------------------------------------------------------- reward and gold answers


def _metric(data_source: str, extra: Mapping[str, Any], where: str) -> str:
    """Names the metric; `accuracy` is settled by `_gold`, which sees the answers."""
    kind = data_source.lower()
    mode = str(extra.get("reward_mode") or "").strip().lower()
    decided = _DECIDES.match(kind)
    if decided:
        return METRIC_OF[decided[1] or kind]
    task = _TASK.match(mode)
    for metric, numbers in _LONGBENCH_PRO.items():
        if task and task[1] in numbers:
            return metric
    found = METRIC_OF.get(mode) or METRIC_OF.get(kind)
    if found is None:
        raise Fault(
            f"{where} is rewarded by {mode[:60]!r} (data_source {data_source[:60]!r}), which is "
            f"unknown; known are {', '.join(METRIC_OF)} and LongBench Pro's T1.1 to T11.2",
            METRIC,
        )
    return found


def _gold(truth: Any, metric: str, where: str) -> tuple[tuple[str, ...], str]:
    """Returns the gold answers, as many as the metric wants, and the metric."""
    if isinstance(truth, list) and truth and isinstance(truth[-1], Mapping):
        truth = truth[-1]
    if isinstance(truth, Mapping):
        items, label = truth.get("doc_ids"), truth.get("golden_label")
        wants_list = metric in (*LISTS, "rouge_l", _ACCURACY)
        truth = (items or label) if wants_list else (label or items)
    if isinstance(truth, str):
        truth = truth.split("\n") if metric in LISTS else [truth]
    if isinstance(truth, int | float):
        truth = [str(truth)]
    if not isinstance(truth, list) or not all(isinstance(gold, str) for gold in truth):
        raise Fault(f"{where}: 'ground_truth' must be text or texts, it is {truth!r:.80}")
    answers = tuple(gold.strip() for gold in truth if gold.strip())
    if not answers:
        raise Fault(f"{where} has no gold answer in 'reward_model'", NO_GOLD)
    if metric == _ACCURACY:  # theirs looks at the first answer only
        answers = answers[:1]
        letter = len(answers[0]) == 1 and answers[0].isascii() and answers[0].isalpha()
        metric = "choice" if letter else "normalised_em"
    return answers, metric


# ---------------------------------------------------------------- document and question


def _split(prompt: Any, extra: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns (document, question)."""
    system, user = _messages(prompt, where)
    asked = _text(extra.get("question"), "extra_info.question", where).strip()
    at = user.rfind(asked)
    if at < 0:
        document, around = user, asked
    else:
        before, after = user[:at], user[at + len(asked) :]
        if len(before.strip()) >= len(after.strip()):
            document, around = before, asked + after
        else:
            document, around = after, before + asked
    if not document.strip():
        raise Fault(f"{where} has an empty document: its prompt is all question", NO_TEXT)
    return document.strip(), "\n\n".join(part for part in (system, around.strip()) if part)


def _messages(prompt: Any, where: str) -> tuple[str, str]:
    """Returns the system's and the user's words."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    ok = isinstance(prompt, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt
    )
    if not ok:
        raise Fault(f"{where}: 'prompt' must be a list of messages with role and content")
    said: dict[str, list[str]] = {"system": [], "user": []}
    for message in prompt:
        if message["role"] not in said:
            raise Fault(
                f"{where}: 'prompt' has a message of {message['role']!r:.40}; a task is one "
                f"question, so only system and user messages are read"
            )
        said[message["role"]].append(_content(message.get("content"), where))
    return "\n\n".join(said["system"]).strip(), "\n\n".join(said["user"])


def _content(content: Any, where: str) -> str:
    """A message's text, given as such or as a list of parts."""
    if isinstance(content, list):
        content = "".join(
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return _text(content, "prompt", where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Fault(f"{where}: {name!r} must be a text, it is {value!r:.80}")
    return value
