"""Templates: what a group shares, what is spliced, what is refused."""

import fakes
import numpy as np
import pytest

from notepad_jax.text import prompts
from notepad_jax.text.chat import Frame
from notepad_jax.text.prompts import Template
from notepad_jax.types import tokens

CHUNK, QUESTION, MEMORY = tokens([300, 301, 302]), tokens([310, 311]), tokens([320])
SHIPPED = ("question_last", "chunk_first", "memory_first")


def write(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    return path


def where(whole, part) -> int:
    spots = [i for i in range(len(whole)) if np.array_equal(whole[i : i + len(part)], part)]
    assert len(spots) == 1
    return spots[0]


def test_question_last_by_hand():
    tok, template = fakes.tokenizer(), fakes.template()
    question, memory, write_, answer = map(
        tok.control_id, ("<|question|>", "<|memory|>", "<|write|>", "<|answer|>")
    )
    nothing = int(tok.encode("nothing")[0])
    update = template.update_prompt(QUESTION, CHUNK, tokens())
    assert update.shared.tolist() == [300, 301, 302]
    assert update.tail.tolist() == [question, 310, 311, memory, nothing, write_]
    assert update.draft.tolist() == [nothing, tok.stop_ids[0]]
    last = template.answer_prompt(QUESTION, MEMORY)
    assert last.shared.tolist() == [question]
    assert last.tail.tolist() == [310, 311, memory, 320, answer]
    assert template.keep.tolist() == [tok.control_id("<|keep|>")]
    assert template.longest_prompt(2, 3, 1) == 3 + 1 + 2 + 1 + 1 + 1


@pytest.mark.parametrize("name", SHIPPED)
def test_shared_never_depends_on_the_memory(name):
    template = fakes.template(name)
    one = template.update_prompt(QUESTION, CHUNK, MEMORY)
    two = template.update_prompt(QUESTION, CHUNK, tokens([330, 331, 332]))
    assert np.array_equal(one.shared, two.shared)
    assert len(one.tail) and len(one.shared)
    last = template.answer_prompt(QUESTION, MEMORY)
    assert np.array_equal(last.shared, template.answer_prompt(QUESTION, tokens([330])).shared)
    for part in (QUESTION, MEMORY, CHUNK):
        where(one.tokens, part)
    assert len(one.tokens) == template.longest_prompt(2, 3, 1) or name != "question_last"


def test_the_question_after_the_chunk_is_not_shared():
    template = fakes.template("question_last")
    one, two = (template.update_prompt(tokens([i]), CHUNK, MEMORY) for i in (310, 311))
    assert np.array_equal(one.shared, two.shared)


def test_orders_of_the_shipped_templates():
    prompt = fakes.template("chunk_first").update_prompt(QUESTION, CHUNK, MEMORY)
    assert where(prompt.shared, QUESTION) < where(prompt.shared, CHUNK)
    assert where(prompt.tokens, MEMORY) == len(prompt.shared)
    prompt = fakes.template("memory_first").update_prompt(QUESTION, CHUNK, MEMORY)
    assert where(prompt.tokens, MEMORY) == len(prompt.shared) < where(prompt.tokens, CHUNK)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("memory", [MEMORY, tokens()])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_prompt_like_another_has_what_it_would_have_alone(name, memory, keeps):
    template, other = fakes.template(name), tokens([340, 341])
    like = template.update_prompt(QUESTION, CHUNK, memory, keeps=keeps)
    alone = template.update_prompt(QUESTION, other, memory, keeps=keeps)
    found = template.update_prompt(QUESTION, other, memory, keeps=keeps, like=like)
    for part in ("shared", "tail", "draft"):
        assert getattr(found, part).tolist() == getattr(alone, part).tolist()
    assert (found.tail is like.tail) == (name != "memory_first")  # whose tail shows the chunk


def test_chunk_before_memory_before_question_is_cut_at_the_memory(tmp_path):
    path = write(
        tmp_path,
        "a comment\n[update]\nthe {chunk} of {memory} is {question}\n"
        "[answer]\n{question}{memory}\n[no_memory]\nnothing\n[keep]\n",
    )
    tok = fakes.tokenizer()
    template = Template.load(path, tok)
    prompt = template.update_prompt(QUESTION, CHUNK, MEMORY)
    assert prompt.shared.tolist() == [*tok.encode("the"), *CHUNK, *tok.encode("of")]
    assert len(template.keep) == 0
    assert len(template.answer_prompt(QUESTION, MEMORY).shared) == 0


def test_chat_wraps_both_turns_and_ends_with_a_line_break(tmp_path):
    path = write(
        tmp_path,
        "[chat]\n<|im_start|>red\n{turn}<|im_end|>\n<|im_start|>blue\\n\n\n"
        "[update]\n{chunk}{memory}{question}\n[answer]\n{question}{memory} \\boxed{...}\n"
        "[no_memory]\nnothing\n[keep]\n",
    )
    tok = fakes.tokenizer()
    prompt = Template.load(path, tok).update_prompt(QUESTION, CHUNK, MEMORY)
    assert prompt.tokens[0] == tok.control_id("<|im_start|>")
    assert prompt.tokens[-1] == tok.encode("\n")[-1]


def test_a_frame_takes_the_place_of_the_chat_section_and_of_nothing_else():
    tok, frame = fakes.tokenizer(), Frame("<|im_end|>", "\n<|answer|>\n", (7, 8))
    template = Template.load("chunk_first", tok, frame)
    prompt = template.update_prompt(QUESTION, CHUNK, MEMORY)
    assert prompt.tokens[0] == tok.control_id("<|im_end|>")
    assert prompt.tokens[-1] == tok.encode("\n")[-1]
    assert template.stop_ids == (7, 8) and prompt.draft[-1] == 7
    assert tok.control_id("<|im_start|>") not in prompt.tokens
    raw = Template.load("question_last", tok, frame)
    assert raw.stop_ids == tok.stop_ids
    assert [*map(str, raw.update)] == [*map(str, fakes.template().update)]


GOOD = {
    "update": "{chunk}{question}{memory}",
    "answer": "{question}{memory}",
    "no_memory": "nothing",
    "keep": "",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": "{chunk}{memory}"}, "needs {chunk}, {memory}, {question}, once each"),
        ({"update": "{chunk}{question}{memroy}"}, "has {chunk}, {question}, {memroy}"),
        ({"answer": "{question}{memory}{chunk}"}, "section .answer."),
        ({"no_memory": ""}, "no_memory. is empty"),
        ({"answer": "<|typo|>{question}{memory}"}, "no control piece"),
        ({"anwser": "red"}, "section .anwser. is unknown"),
        ({"chat": "red"}, "needs the placeholder {turn}"),
    ],
)
def test_faulty_templates_are_explained(tmp_path, change, message):
    text = "".join(f"[{name}]\n{body}\n" for name, body in (GOOD | change).items())
    with pytest.raises(ValueError, match=message):
        Template.load(write(tmp_path, text), fakes.tokenizer())


def test_a_template_as_windows_writes_it_and_one_that_is_no_text(tmp_path):
    text = "".join(f"[{name}]\n{body}\n" for name, body in GOOD.items())
    marked, plain = tmp_path / "marked" / "t.txt", tmp_path / "t.txt"
    marked.parent.mkdir()
    marked.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    plain.write_text(text)
    digests = {Template.load(path, fakes.tokenizer()).digest for path in (marked, plain)}
    assert len(digests) == 1
    plain.write_bytes(b"[update]\n\xff")
    with pytest.raises(ValueError, match="template .*t.txt is no UTF-8 text; write it as such"):
        Template.load(plain, fakes.tokenizer())


def test_missing_and_doubled_sections_and_files(tmp_path):
    with pytest.raises(ValueError, match="section .answer. is missing"):
        Template.load(write(tmp_path, "[update]\nx"), fakes.tokenizer())
    with pytest.raises(ValueError, match="is twice"):
        Template.load(write(tmp_path, "[update]\nx\n[update]\ny"), fakes.tokenizer())
    with pytest.raises(
        ValueError, match="chunk_first, document_first, document_first_actions, memory_first, "
    ):
        prompts.find("chunk_frist")
