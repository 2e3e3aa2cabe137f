r"""Where the answer stands: each contract's cases, thinking that must not count, hostile text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.scoring import extraction
from notepad_jax.scoring.extraction import CONTRACTS, Extracted, extract

SIGNS = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    r"\boxed{",
    "{",
    "}",
    "[Answer]",
    "x",
    "\n",
]


@pytest.mark.parametrize(
    ("contract", "text", "answer"),
    [
        ("plain", " ann \n", " ann \n"),
        ("plain", "", ""),
        ("plain", r"\boxed{5}", r"\boxed{5}"),
        ("boxed", r"so \boxed{5}.", "5"),
        ("boxed", r"\boxed{1} or \boxed{2}", "2"),
        ("boxed", r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        ("boxed", r"\boxed{}", ""),
        ("tag", "<answer>a</answer> <answer>b\nc</answer> bye", "b\nc"),
        ("tag", "<answer>a <answer>b</answer></answer>", "b"),
        ("marker", "[Answer] no\n[Answer]\na\nb", "\na\nb"),
        ("marker", "[答案]\n甲", "\n甲"),
        ("auto", "just this", "just this"),
        ("auto", r"<answer>\boxed{5}</answer>", "5"),
        ("auto", r"\boxed{5} and then <answer>6</answer>", "6"),
        ("auto", "<answer>6</answer> [Answer] 7", " 7"),
        ("auto", r"<answer>1</answer> \boxed{2} <answer>3</answer>", "3"),
        ("auto", "So the answer is 5.", "So the answer is 5."),
        ("signed", "I think the answer is 4, no: the answer is **5**. ", "5"),
        ("signed", r"Therefore, the answer is \boxed{5}.", "5"),
        ("signed", r"\boxed{5}, so the answer is 6", "6"),
        ("signed", "<answer>6</answer>", "6"),
        ("signed", "the answer is.", ""),
    ],
)
def test_the_answer_by_contract(contract, text, answer):
    assert extract(text, contract) == Extracted(answer, "")


@pytest.mark.parametrize(
    ("contract", "text", "problem"),
    [
        ("boxed", "5", "no_box"),
        ("signed", "5", "no_sign"),
        ("signed", "", "no_sign"),
        ("signed", r"the answer is \boxed{5", "unclosed_box"),
        ("boxed", r"\boxed{5", "unclosed_box"),
        ("boxed", r"\boxed{4} then \boxed{5", "unclosed_box"),  # the last one counts, cut or not
        ("tag", "5", "no_tag"),
        ("tag", "5</answer>", "no_tag"),
        ("tag", "<answer>4</answer><answer>5", "unclosed_tag"),
        ("marker", "Answer: 5", "no_marker"),
        ("auto", r"<answer>4</answer> \boxed{5", "unclosed_box"),
        ("plain", "a" * (extraction.LONGEST + 1), "too_long"),
        ("boxed", r"\boxed{" + "a" * 60_000 + "}", "unclosed_box"),
        ("tag", "<answer>" + "a" * 60_000 + "</answer>", "too_long"),
    ],
)
def test_why_there_is_no_answer(contract, text, problem):
    assert extract(text, contract) == Extracted(None, problem)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("sign", [r"\boxed{4}", "<answer>4</answer>", "[Answer] 4"])
def test_signs_in_the_thinking_do_not_count(contract, sign):
    thought = f"<think>perhaps {sign}</think>"
    assert extract(f"{thought} five", contract) == extract(" five", contract)
    assert extract(f"opened by the prompt {sign}</think> five", contract) == extract(
        " five", contract
    )
    # What was thought before a second thinking counts as little as the thinking.
    assert extract(f"{thought}{sign}<think>no</think> five", contract) == extract(" five", contract)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("text", [r"<think>\boxed{5}", r"<think>a</think>\boxed{5}<think>b"])
def test_thinking_that_never_ends_gives_no_answer(contract, text):
    assert extract(text, contract) == Extracted(None, "unclosed_thinking")


@given(st.lists(st.sampled_from(SIGNS)).map("".join), st.sampled_from(sorted(CONTRACTS)))
def test_there_is_an_answer_or_a_reason_and_the_answer_is_of_the_text(text, contract):
    found = extract(text, contract)
    assert (found.answer is None) == bool(found.problem)
    assert found.answer is None or found.answer in text.rpartition("</think>")[2]


@given(st.lists(st.sampled_from(SIGNS)).map("".join))
def test_auto_is_one_of_the_others(text):
    others = [extract(text, name) for name in ("boxed", "tag", "marker", "plain")]
    assert extract(text, "auto") in others


@settings(deadline=None)
@given(st.text(alphabet="ab{}\\").filter(lambda s: s.count("{") == s.count("}")))
def test_what_was_boxed_comes_out_when_its_braces_match(content):
    depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content))]
    if all(depth >= 0 for depth in depths) and r"\boxed{" not in content:
        assert extract(rf"so \boxed{{{content}}} it is", "boxed").answer == content


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    "bomb",
    [
        "a",
        "{",
        r"\boxed{",
        "}",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "[Answer]",
        "\ud800",
    ],
)
def test_ten_megabytes_cost_little(contract, bomb):
    text = bomb * (10_000_000 // len(bomb))
    began = time.process_time()
    found = extract(text, contract)
    assert time.process_time() - began < 1.0  # about 0.03 on an idle core
    assert found.answer is None or len(found.answer) <= extraction.LONGEST


def test_an_unknown_contract_is_named():
    with pytest.raises(ValueError, match="no contract 'json'; use one of plain, auto, "):
        extract("", "json")


@pytest.mark.parametrize(
    "said",
    [r"\boxed{\text{Hugo Marwick}}", r"\boxed{\textbf{\mathrm{Hugo} Marwick}}",
     r"\boxed{\mbox{Hugo} \emph{Marwick}}"],
)  # fmt: skip
def test_latex_around_words_is_no_part_of_a_boxed_answer(said):
    assert extract(said, "boxed").answer == extract(said, "auto").answer == "Hugo Marwick"
