"""GoLongRL's rows, in the forms their trainer reads, made into tasks that score as they should."""

import json

import pytest

from notepad_jax.data import files
from notepad_jax.data.foreign import golongrl
from notepad_jax.scoring import metrics

TEXT = "Herons wade.\nOtters swim.\nThe Orde was bridged in 1893. " * 3


def row(data_source="longbench_pro", truth="x", mode="em", question="Which year?", **extra) -> dict:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{TEXT}\n\n{question}\nBe brief."}],
        "ability": "a",
        "reward_model": {"ground_truth": truth},
        "extra_info": {"reward_mode": mode, "question": question, **extra},
    }


def make(row: dict):
    return golongrl.task_of(row, "id", "file row 1")


def text_of(task) -> str:
    return "".join(task.document.pieces())


# ---------------------------------------------------------------- rewards


NINE = [  # the nine task types, by the names of their metrics: gold, a right answer, a wrong one
    ("em", "7", "7", "8"),
    ("choice", "B", "The answer is (B).", "The answer is (C)."),
    ("set_f1", ["a b", "c"], "C\nA  b", "d"),
    ("numeric", "1/2", "0.5", "0.6"),
    ("row_iou", '{"data": [["a", 1]]}', '[["a", 1.0]]', "[]"),
    ("sub_em", ["a", "b"], "b\na", "c"),
    ("ndcg", ["a", "b"], "a\nb", "c"),
    ("pairwise", ["a", "b"], "a\nb", "b\na"),
    ("rouge_l", ["the cat sat"], "the cat sat", "dogs"),
]


@pytest.mark.parametrize("mode, gold, right, wrong", NINE)
def test_the_nine_rewards_by_name(mode, gold, right, wrong):
    task = make(row(mode=mode, truth=gold))
    assert task.contract == "auto" and task.source == "golongrl/longbench_pro"
    assert metrics.score(right, task.answers, task.metric, task.contract).value == 1.0
    assert metrics.score(wrong, task.answers, task.metric, task.contract).value == 0.0


@pytest.mark.parametrize(
    "data_source, mode, truth, metric, answers",
    [
        # As published: the ground truth is an object, doc_ids for lists, golden_label else.
        (
            "longbench_pro",
            "T1.2 Key-Snippet Retrieval",
            {"doc_ids": ["b", "a"]},
            "ndcg",
            ("b", "a"),
        ),
        ("longbench_pro", "T2.1 Global Timeline", {"doc_ids": ["b", "a"]}, "pairwise", ("b", "a")),
        ("longbench_pro", "T3.2 Single-Hop", {"doc_ids": ["C", "D"]}, "choice", ("C",)),
        ("longbench_pro", "T11.1 Long-Range", {"doc_ids": ["Ann"]}, "normalised_em", ("Ann",)),
        ("longbench_pro", "T4.1 Summary", {"doc_ids": ["s", "t"]}, "rouge_l", ("s", "t")),
        ("longbench_pro", "T5.1 Full-Sentence", {"doc_ids": ["s"]}, "set_f1", ("s",)),
        ("longbench_pro", "T10.2 Induction", {"doc_ids": ["s"]}, "sub_em_lines", ("s",)),
        ("EM", "rule", {"golden_label": "x y", "doc_ids": []}, "em", ("x y",)),
        ("selection", None, {"golden_label": "The correct answer is (B)"}, "choice", None),
        ("abc_math_longcot_math_verify", "", {"golden_label": "42"}, "numeric", ("42",)),
        ("multitableqa_pretraining", "", {"golden_label": '{"data": []}'}, "row_iou", None),
        # A list of objects: the last one counts. Text of several lines: the items of a list.
        ("EM", "", [{"golden_label": "old"}, {"golden_label": "new"}], "em", ("new",)),
        ("other", "set_f1", "a\n\n b \n", "set_f1", ("a", "b")),
        ("other", "numeric", 42, "numeric", ("42",)),
        ("other", "NDCG", ["a"], "ndcg", ("a",)),
        ("other", "Pairwise_Accuracy", ["a", "b"], "pairwise", ("a", "b")),
    ],
)
def test_published_rewards_and_ground_truths(data_source, mode, truth, metric, answers):
    task = make(row(data_source, truth, mode))
    assert task.metric == metric
    if answers:
        assert task.answers == answers
    assert task.metric in metrics.METRICS


def test_every_known_reward_is_a_metric():
    for mode in (
        *golongrl.METRIC_OF,
        *(f"T{n} x" for ns in golongrl._LONGBENCH_PRO.values() for n in ns),
    ):
        task = make(row(mode=mode, truth=["A", "B"]))
        assert task.metric in metrics.METRICS
    # All 25 tasks of LongBench Pro, each once.
    numbers = [n for ns in golongrl._LONGBENCH_PRO.values() for n in ns]
    assert len(numbers) == len(set(numbers)) == 25


# ---------------------------------------------------------------- document and question


def test_the_question_is_cut_out_where_it_stands_last():
    task = make(row(question="Which year?"))
    assert text_of(task) == TEXT.strip()
    assert task.question == "Which year?\nBe brief."
    first = row(question="Which year?")
    first["prompt"][0]["content"] = f"Read this. Which year?\n\n{TEXT}"
    task = make(first)
    assert text_of(task) == TEXT.strip() and task.question == "Read this. Which year?"
    twice = row(question="Which year?")
    twice["prompt"][0]["content"] = f"Which year?\n{TEXT}\nWhich year?"
    task = make(twice)
    assert text_of(task) == f"Which year?\n{TEXT.strip()}" and task.question == "Which year?"


def test_a_question_that_is_not_in_the_prompt_stands_beside_the_whole_of_it():
    task = make(row(question="Which year?") | {"prompt": TEXT})
    assert text_of(task) == TEXT.strip() and task.question == "Which year?"


def test_system_messages_stay_in_front_of_the_question():
    one = row()
    one["prompt"] = [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {"role": "user", "content": "Which year?"},
    ]
    task = make(one)
    assert task.question == "You are careful.\n\nWhich year?" and text_of(task) == TEXT.strip()


def test_a_contract_is_taken_from_the_row():
    assert make(row(contract="boxed")).contract == "boxed"
    with pytest.raises(ValueError, match="contract 'loud' is none of plain"):
        make(row(contract="loud"))


# ---------------------------------------------------------------- files


def test_jsonl_and_parquet_give_the_same_tasks_and_can_be_written(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    truth = {"doc_ids": ["a", "b"], "golden_label": "a", "summary": "English"}
    rows = [row(truth=truth, mode=mode) for mode in ("ndcg", "em", "rouge_l")]
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "g.parquet")
    one, two = (list(golongrl.read(tmp_path / f"g.{kind}")) for kind in ("jsonl", "parquet"))
    assert one == two and [task.id for task in one] == [f"golongrl-g-{k}" for k in (1, 2, 3)]
    files.write(tmp_path / "tasks.jsonl", golongrl.read(tmp_path / "g.parquet"), [9, 9, 9])
    assert [task.answers for task, _ in files.read(tmp_path / "tasks.jsonl")] == [
        ("a", "b"), ("a",), ("a", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_column_that_stands_twice_leaves_its_row_out(tmp_path, form):
    good = json.dumps(row())
    rows = [good, good.replace('"ground_truth"', '"ground_truth": "y", "ground_truth"'), good]
    path, told = tmp_path / f"g.{form}", []
    path.write_text("\n".join(rows) if form == "jsonl" else f"[{', '.join(rows)}]")
    tasks = golongrl.read(path, told.append)
    assert [task.id for task in tasks] == ["golongrl-g-1", "golongrl-g-3"]
    assert [str(fault) for fault in told] == [
        f"{path} row 2 has two columns 'ground_truth'; keep one"
    ]


def without(name: str) -> dict:
    return {key: value for key, value in row().items() if key != name}


@pytest.mark.parametrize(
    "bad, message",
    [
        (without("data_source"), "'data_source' must be a text"),
        (without("prompt"), "'prompt' must be a list of messages"),
        (without("extra_info"), "has no object 'extra_info'"),
        (without("reward_model"), "'ground_truth' must be text or texts, it is None"),
        (row(truth=[]), "has no gold answer"),
        (row(truth=" "), "has no gold answer"),
        (row(truth={"doc_ids": []}), "has no gold answer|must be text or texts"),
        (row(truth=[1, 2]), "'ground_truth' must be text or texts"),
        (row(mode="vibes"), "is rewarded by 'vibes' .*which is unknown; known are em, choice"),
        (row(mode="T99.1 new"), "is unknown"),
        (row(question=""), "'extra_info.question' must be a text"),
        (row() | {"prompt": "Which year?"}, "has an empty document"),
        (row() | {"prompt": [{"role": "assistant", "content": "x"}]}, "a message of 'assistant'"),
        (row() | {"prompt": [{"role": "user", "content": None}]}, "'prompt' must be a text"),
    ],
)
def test_a_bad_row_is_one_line_with_file_and_row(tmp_path, bad, message):
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(bad))
    with pytest.raises(ValueError, match=f"g.jsonl row 2.*({message})") as caught:
        list(golongrl.read(path))
    assert "\n" not in str(caught.value)
