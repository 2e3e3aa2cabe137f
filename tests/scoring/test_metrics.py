r"""The reward's cases with the reference's verdicts, SQuAD's and RULER's numbers, hostile text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.scoring import long_context, metrics, published
from notepad_jax.scoring.extraction import CONTRACTS
from notepad_jax.scoring.metrics import METRICS, Score

BOXED = r"\boxed{Paris}"


@pytest.mark.parametrize(
    ("prediction", "answers", "reward"),
    [
        (r"The answer is \boxed{Paris}.", ["Paris"], 1),
        ("Paris", ["Paris"], 0),
        (r"\boxed{PARIS}", ["paris"], 1),
        (r"\boxed{The Paris}", ["Paris"], 0),
        (r"\boxed{NewYorkCity}", ["New York City"], 1),
        (r"\boxed{Lyon} then \boxed{Paris}", ["Paris"], 1),
        (r"\boxed{Paris} then \boxed{Lyon}", ["Paris"], 0),
        (r"\boxed{b}", ["a", "b"], 1),
        (r"\boxed{Paris", ["Paris"], 0),
        (BOXED + "x" * 287, ["Paris"], 1),
        (BOXED + "x" * 288, ["Paris"], 0),
        (r"\boxed{\frac{1}{2}}", [r"\dfrac{1}{2}"], 1),
        (r"\boxed{\text{Paris}}", ["Paris"], 1),
        (r"\boxed{50\%}", ["50%"], 1),
        (r"\boxed{\left( 1, 2 \right)}", ["(1,2)"], 1),
        (r"\boxed{}", ["Paris"], 0),
        (r"\boxed{$}", ["$"], 0),
        (r"\boxed{Paris} then \boxed{Ly", ["Paris"], 0),
        ("", ["Paris"], 0),
    ],
)
def test_boxed(prediction, answers, reward):
    assert METRICS["boxed"](prediction, answers) == reward


@pytest.mark.parametrize(
    ("name", "prediction", "answers", "score"),
    [
        ("em", " ann \n", ["ann"], 1),
        ("em", "Ann", ["ann"], 0),
        ("normalised_em", "The Nokia!", ["nokia"], 1),
        ("normalised_em", "", ["The The"], 0),
        ("normalised_em", "the the", ["The The"], 1),
        ("token_f1", "the red house", ["a red car"], 0.5),
        ("token_f1", "red red", ["red"], 2 / 3),
        ("token_f1", "blue", ["red", "blue"], 1),
        ("token_f1", "", ["red"], 0),
        ("sub_em", "It was Nokia.", ["no"], 0),
        ("sub_em", "Well, no.", ["No"], 1),
        ("sub_em", "Paris", ["Paris in France"], 0),
        ("sub_em", "The New York City mayor", ["new york"], 1),
        ("sub_em", "anything", ["?!"], 0),
        ("sub_em", "nonono no", ["no"], 1),
        ("sub_em", "The answer is A.", ["A"], 1),
        ("sub_em", "It is a cat.", ["A"], 0),
        ("sub_em", "It was Mu\u0308ller.", ["M\u00fcller"], 1),
        ("sub_em", "It was M\u00fcller.", ["Mu\u0308ller"], 1),
        ("sub_em", "интернет", ["нет"], 0),
        ("sub_em", "Нет, это не он.", ["нет"], 1),
        ("set_f1", "Mu\u0308ller", ["M\u00fcller"], 1),
        ("sub_em", "答案是东京。", ["东京"], 1),
        ("sub_em_two_way", "Nokia", ["no"], 1),
        ("sub_em_two_way", "the", ["Paris"], 1),
        ("sub_em_two_way", "Paris, France", ["Paris"], 1),
        *[("sub_em_two_way", silence, ["Paris"], 0) for silence in ("", " \n\u2003", "...", "**")],
        ("token_f1", "yes", ["Yes."], 1),
        ("token_f1", "yes it is", ["yes"], 0),
        ("token_f1", "no", ["no answer"], 0),
        ("token_f1", "the noanswer", ["noanswer"], 1),
        ("token_f1", "no", ["no answer", "no"], 1),
    ],
)
def test_evaluation_metrics(name, prediction, answers, score):
    assert METRICS[name](prediction, answers) == pytest.approx(score)


@pytest.mark.slow
@settings(deadline=None)  # a formula starts a process
@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_metrics_stay_in_bounds_and_know_the_right_answer(prediction, answers):
    for name, metric in METRICS.items():
        assert 0.0 <= metric(prediction, answers) <= 1.0, name
    for name in ("em", "normalised_em"):
        assert METRICS[name](answers[0], answers) == 1.0


@pytest.mark.parametrize("bomb", ["a", "{", "\\boxed{", "\\text{", "a b ", "\0", "}{"])
def test_hostile_answers_cost_bounded_time(bomb):
    began = time.process_time()
    for metric in METRICS.values():
        metric(bomb * 1_000_000, ["a" * 1000, bomb * 300])
    assert time.process_time() - began < 2.0


# ---------------------------------------------------------------- score: contract, then metric


@pytest.mark.parametrize(
    ("text", "answers", "metric", "contract", "value", "problem"),
    [
        ("ann", ["ann"], "em", "plain", 1, ""),
        ("bob", ["ann"], "em", "plain", 0, ""),
        ("", ["ann"], "em", "plain", 0, ""),
        ("<think>bob</think> ann", ["ann"], "em", "plain", 1, ""),
        *((BOXED, ["Paris"], "boxed", contract, 1, "") for contract in CONTRACTS),
        ("<think>ann", ["ann"], "sub_em", "plain", 0, "unclosed_thinking"),
        (r"\boxed{ann}", ["ann"], "em", "boxed", 1, ""),
        ("ann", ["ann"], "em", "boxed", 0, "no_box"),
        (r"\boxed{ann}", ["ann"], "boxed", "plain", 1, ""),
        ("ann", ["ann"], "boxed", "plain", 0, "no_box"),
        (r"\boxed{ann", ["ann"], "boxed", "plain", 0, "unclosed_box"),
        ("<answer>b\na</answer>", ["a", "b"], "set_f1", "tag", 1, ""),
        ("b\na", ["a", "b"], "set_f1", "tag", 0, "no_tag"),
        ("[Answer]\nb\na", ["a", "b"], "pairwise", "marker", 0, ""),
        ("[[1", ["[[1]]"], "row_iou", "plain", 0, "bad_json"),
        ("Paris", ["A"], "choice", "plain", 0, "no_letter"),
        ("Paris", ["4"], "numeric", "plain", 0, "no_number"),
        (r"<answer>\boxed{4.0}</answer>", ["4"], "numeric", "auto", 1, ""),
        ("a" * 60_000, ["a" * 60_000], "em", "plain", 0, "too_long"),
    ],
)
def test_score(text, answers, metric, contract, value, problem):
    assert metrics.score(text, answers, metric, contract) == Score(value, problem)


THOUGHTLESS = st.text(max_size=30).filter(lambda text: "think>" not in text)


@given(THOUGHTLESS, THOUGHTLESS)
def test_a_plain_answer_without_thinking_is_judged_as_it_stands(text, gold):
    for said in (text, gold, f" {gold}\n"):
        assert metrics.score(said, [gold], "em", "plain").value == (said.strip() == gold.strip())


def test_a_summary_is_not_scored_over_its_thinking():
    thought = f"<think>{'the cat sat on the mat ' * 9}</think>"
    assert metrics.score(thought, ["the cat sat"], "rouge_l", "plain").value == 0.0
    assert metrics.score(thought + "the cat sat", ["the cat sat"], "rouge_l", "plain").value == 1.0


def test_called_directly_a_malformed_answer_is_worth_nothing():
    for name, metric in METRICS.items():
        assert metric("", ["[[1]]"]) == 0.0, name


LABELS = {name: [words[-1]] for name, words in long_context.LABELS.items()}


@pytest.mark.parametrize("name", METRICS)
def test_the_gold_answer_is_worth_everything(name):
    golds = {"numeric": ["1/3"], "row_iou": ['[["a", 1]]'], "published_choice": ["B"],
             "choice": ["B"], "published_row_iou": ['{"data": [["a", 1]]}'],
             "published_accuracy": ["Ann Lee"], **LABELS}.get(name, ["Ann Lee", "bob"])  # fmt: skip
    metrics.check_gold(golds, name)
    said = "\n".join(golds) if name in metrics.ALL_WANTED else golds[-1]
    said = f"Final Answer: [{', '.join(golds)}]" if name == "graphwalks" else said
    said = rf"\boxed{{{said}}}" if name in ("boxed", "memagent") else said
    said = f"The correct answer is ({said})" if name == "published_choice" else said
    assert METRICS[name](said, golds) == pytest.approx(1.0)
    assert METRICS[name]("nobody here", golds) == 0.0


@pytest.mark.parametrize(
    ("metric", "golds", "message"),
    [
        ("row_iou", ["[[1]]", "a,b"], r"'a,b' is itself worth 0 by metric 'row_iou' \(bad_json\)"),
        ("choice", ["Paris"], r"'Paris' is itself worth 0 by metric 'choice' \(no_letter\)"),
        ("sub_em", ["a", " "], r"' ' is itself worth 0 by metric 'sub_em'; mend"),
        ("ruler_all", ["a\tb"], "worth 0 by metric 'ruler_all'"),
        ("boxed", ["{"], r"'{' is itself worth 0 by metric 'boxed' \(unclosed_box\)"),
    ],
)
def test_gold_answers_that_nobody_could_give_are_refused(metric, golds, message):
    with pytest.raises(ValueError, match=message):
        metrics.check_gold(golds, metric)


# ---------------------------------------------------------------- RULER


def ruler(predictions, references, part):
    """The spec's formula as it is written: 100 x the mean over samples, rounded."""
    worths = []
    for said, golds in zip(predictions, references, strict=True):
        hits = [1.0 if gold.lower() in said.lower() else 0.0 for gold in golds]
        worths.append(max(hits) if part else sum(hits) / len(hits))
    return round(100 * sum(worths) / len(worths), 2)


def test_ruler_scores_as_its_formula():
    predictions = [
        "The special magic numbers are 1234567 and 7654321.",
        "7654321",
        "XABCD, xyzab and Nothing",
        "",
        "no is in Nokia",  # a substring counts in RULER, whole word or not
    ]
    references = [
        ["1234567", "7654321"],
        ["1234567", "7654321", "7654321"],
        ["xabcd", "XYZAB", "other", "fourth"],
        ["paris"],
        ["no", "NOK"],
    ]
    for name, part, total in (("ruler_all", False, 63.33), ("ruler_part", True, 80.0)):
        ours = [METRICS[name](*pair) for pair in zip(predictions, references, strict=True)]
        # all: (1 + 2/3 + 2/4 + 0 + 1) / 5 = .6333; part: (1 + 1 + 1 + 0 + 1) / 5 = .8
        assert round(100 * sum(ours) / len(ours), 2) == total
        assert total == ruler(predictions, references, part)


@given(st.text("abAB \n"), st.lists(st.text("abAB", min_size=1), min_size=1, max_size=4))
def test_ruler_by_its_formula_on_any_letters(said, golds):
    assert round(100 * METRICS["ruler_all"](said, golds), 2) == ruler([said], [golds], False)
    assert round(100 * METRICS["ruler_part"](said, golds), 2) == ruler([said], [golds], True)


def test_ruler_takes_control_characters_for_newlines():
    assert METRICS["ruler_all"]("a\tb", ["a\nb"]) == 1.0
    assert METRICS["ruler_all"]("a\x00b", ["a\x00b"]) == 0.0


# ---------------------------------------------------------------- hostile answers

PARTS = ["<think>", "</think>", r"\boxed{", "}", "{", "<answer>", "</answer>", "[Answer]", "```"]
PARTS += ["[[1", "]]", '"', "a", "B", "7", "/", "%", "-", ".", "\n", " ", "\0", "\ud800", "é", "字"]
GOLDS = {"numeric": ["7/3"], "row_iou": ['[["a", 7]]'], "choice": ["B"], "published_choice": ["B"],
         "published_row_iou": ['{"data": [["a", 7]]}']}  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(PARTS) | st.characters(), max_size=30).map("".join),
    st.sampled_from(sorted(METRICS)),
    st.sampled_from(sorted(CONTRACTS)),
)
def test_any_text_gets_a_score_and_a_malformed_one_a_reason(text, metric, contract):
    worth = metrics.score(text, GOLDS.get(metric, ["a", "B 7"]), metric, contract)
    assert 0.0 <= worth.value <= 1.0
    assert not worth.problem or worth.value == 0.0
    assert " " not in worth.problem and len(worth.problem) < 30  # it names a counter


BOMBS = {
    "letters": "a",
    "words": "a b ",
    "boxes": r"\boxed{",
    "closed boxes": r"\boxed{1}",
    "open": "[",
    "depth": "[[",
    "object": '{"a":',
    "braces": "}{",
    "latex": r"\text{",
    "fractions": r"\frac{1}{",
    "digits": "9",
    "fraction bars": "9/",
    "commas": "1,111",
    "statements": "answer answer is ",
    "spaces": " ",
    "newlines": "\n",
    "lines": "a\nb\n",
    "nuls": "\0",
    "surrogates": "\ud800",
    "thoughts": "<think></think>",
    "fences": "```",
    "Han": "字",
    "marks": "e\u0301",
    "grows when folded": "\u0130",  # lower case of two characters
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("size", [metrics.LONGEST, 10_000_000])
def test_hostile_answers_are_scored_quickly(bomb, size):
    text = (bomb * (size // len(bomb) + 1))[:size]
    for metric in METRICS:
        golds = GOLDS.get(metric, ["ann", "a b c" * 100])
        began = time.process_time()
        worth = metrics.score(text, golds, metric, "plain")
        spent = time.process_time() - began
        assert spent < 2.0, (metric, spent)
        whole = metric in published.METRICS  # judges the end of a text however long it is
        if size > metrics.LONGEST and bomb != "<think></think>" and not whole:
            assert worth == Score(0.0, "too_long")
    for contract in CONTRACTS:
        assert 0.0 <= metrics.score(text, ["ann"], "em", contract).value <= 1.0


def test_ten_thousand_boxes_and_a_depth_of_a_million():
    boxes = r"\boxed{" * 10_000
    assert metrics.score(boxes, ["4"], "numeric", "boxed") == Score(0.0, "unclosed_box")
    assert metrics.score(boxes + "4" + "}" * 10_000, ["4"], "numeric", "boxed") == Score(1.0, "")
    deep = "[" * 1_000_000 + "]" * 1_000_000
    assert (
        metrics.score(f"<answer>{deep}</answer>", ["[[1]]"], "row_iou", "tag").problem == "too_long"
    )
    assert METRICS["row_iou"](deep, ["[[1]]"]) == 0.0


def test_unknown_metric_and_contract_are_named():
    with pytest.raises(ValueError, match="no metric 'bleu'; use one of em, "):
        metrics.score("", ["x"], "bleu", "plain")
    with pytest.raises(ValueError, match="no contract 'json'; use one of plain, "):
        metrics.score("", ["x"], "em", "json")


@pytest.mark.parametrize("said", [r"\boxed{\text{Evelyn}}", r"\boxed{Evelyn}"])
@pytest.mark.parametrize("gold", [r"\text{Evelyn}", "Evelyn"])
@pytest.mark.parametrize("contract", ["boxed", "auto"])
def test_latex_around_words_counts_on_neither_side(said, gold, contract):
    assert metrics.score(said, [gold], "em", contract) == Score(1.0, "")
    assert metrics.score(said, [gold], "boxed", "plain") == Score(1.0, "")
