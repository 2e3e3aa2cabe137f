"""A model's chat template frames our turns; it cannot do anything else, and nothing to us."""

import dataclasses
import datetime
import functools
import pathlib
import tempfile

import fakes
import numpy as np
import pytest
import tiny_bpe

from notepad_jax.text import chat, prompts
from notepad_jax.text.bpe_tokenizer import HuggingFaceTokenizer
from notepad_jax.text.chat import ChatTemplate
from notepad_jax.text.prompts import Template
from notepad_jax.types import tokens

# Three dialects, written by hand in the manner of the families.
CHATML = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """
{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else 'no day' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + today + '\\n<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must take turns, beginning with the user') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
DIALECTS = {
    "chatml": (CHATML, "qwen", "<|im_end|>"),
    "headers": (HEADERS, "llama3", "<|eot_id|>"),
    "inst": (INST, "prepend", "</s>"),
}
HELLO = [{"role": "user", "content": "red?"}]


def made(source: str, **variables) -> ChatTemplate:
    return ChatTemplate(pathlib.Path("mine.jinja"), source, variables)


@functools.cache
def dialect(name: str) -> tuple[ChatTemplate, HuggingFaceTokenizer]:
    source, kind, eos = DIALECTS[name]
    with tempfile.TemporaryDirectory() as path:
        folder = tiny_bpe.folder(pathlib.Path(path), kind, chat_template=source, eos=eos)
        return ChatTemplate.read(folder), HuggingFaceTokenizer(folder)


# ------------------------------------------------------------------------------ rendering


def test_the_dialects_by_hand():
    talk = [*HELLO, {"role": "assistant", "content": "blue"}, {"role": "user", "content": "so"}]
    assert dialect("chatml")[0].render(talk, True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nred?<|im_end|>\n"
        "<|im_start|>assistant\nblue<|im_end|>\n<|im_start|>user\nso<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert dialect("headers")[0].render(HELLO, False) == (
        f"<s>{head.format('system')}Today: 01 Jan 2025\n<|eot_id|>{head.format('user')}"
        "red?<|eot_id|>"
    )
    assert dialect("inst")[0].render(talk[:2], False) == "<s>[INST] red? [/INST] blue</s>"


def test_several_conversations_render_as_they_do_alone():
    template = dialect("chatml")[0]
    asked = [(HELLO, True), (HELLO, False), ([{"role": "system", "content": "x"}, *HELLO], True)]
    assert template.render_all(asked) == [template.render(*one) for one in asked]
    assert template.render_all([]) == []


def test_helpers_that_templates_expect():
    template = made(
        "{%- for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{{ {'b': 'é<', 'a': 1} | tojson }}{{ [1] | tojson(indent=1) }}"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{{ strftime_now('%Y-%m-%d') }}{{ bos_token }}{{ nope is defined }}{{ nope }}",
        bos_token="<s>",
    )
    template = dataclasses.replace(template, now=datetime.datetime(2026, 11, 20))
    wanted = '01{"b": "é<", "a": 1}[\n 1\n]22026-11-20<s>False'
    assert template.render(HELLO, False) == wanted


def test_what_we_do_not_use_is_there_and_none():
    source = "{{ tools is none }} {{ documents is none }} {{ date_string is defined }}"
    assert made(source).render(HELLO, False) == "True True False"
    assert made(source, date_string="1 May").render(HELLO, False) == "True True True"


def test_format_strings_reach_no_attributes():
    source = "{{ '{0.__class__}'.format(1) }}|{{ '%s' | format(messages[0].content) }}"
    assert made(source).render(HELLO, False) == "|red?"


def test_blocks_are_trimmed_as_models_expect():
    assert made("a\n  {% if true %}\nb\n  {% endif %}\nc").render(HELLO, False) == "a\nb\nc"


def test_any_text_comes_through_whole():
    text = 'quotes " \\ {{ 1 }} {% raw %} <b> \u2028 \x00 日本 😀\n'
    assert made("{{ messages[0].content }}!").render([{"content": text}], True) == text + "!"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: .*__class__"),
        ("{{ cycler.__init__.__globals__.os.popen('id') }}", "unsafe|undefined|SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['sys'] }}", "Error"),
        ("{{ messages.append(1) }}", "SecurityError|not safely"),
        ("{{ messages[0].update({'a': 1}) }}", "SecurityError|not safely"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError: .*__class__"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{{ raise_exception('only users\nplease') }}", "mine.jinja: only users please$"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("a\n{% if %}", "line 2: TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
        ("{% for x in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 4000000 charac"),
        ("{{ 'x' * 10**11 }}", "needs more than 512 MB"),
        ("{{ 'x' | center(10**11) | length }}", "needs more than 512 MB"),
        (
            "{% set n = namespace(s='xy') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
            "{% endfor %}{{ n.s | length }}",
            "needs more than 512 MB",
        ),
    ],
)
def test_hostile_and_broken_templates_end_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        made(source).render(HELLO, False)
    assert "\n" not in str(caught.value) and "chat template of mine.jinja" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (10**9)**(10**7) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
)
def test_endless_templates_are_ended(source, monkeypatch):
    monkeypatch.setattr(chat, "MAX_SECONDS", 1)
    with pytest.raises(ValueError, match="more than 1 seconds|needs more than"):
        made(source).render(HELLO, False)


# -------------------------------------------------------------------------------- reading


def test_a_template_is_found_by_the_files(tmp_path):
    assert not chat.has_template(tmp_path)
    with pytest.raises(ValueError, match=r"no chat template .*\[chat\] section"):
        ChatTemplate.read(tmp_path)
    tiny_bpe.folder(tmp_path)
    assert not chat.has_template(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "one"}]
    tiny_bpe.folder(tmp_path, chat_template=named)
    assert chat.has_template(tmp_path)
    read = ChatTemplate.read(tmp_path, thinking=False)
    assert read.source == "one"
    assert read.variables == {"bos_token": "<s>", "eos_token": "<|im_end|>", "thinking": False}
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "no", "unk_token": {"content": "<unk>"}, "additional_special_tokens": []}'
    )
    assert ChatTemplate.read(tmp_path).variables == {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>",
    }  # fmt: skip
    (tmp_path / "chat_template.json").write_text('{"chat_template": "two"}')
    assert ChatTemplate.read(tmp_path).source == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate.read(tmp_path).source == "three"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        ChatTemplate.read(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * 1_000_001)
    with pytest.raises(ValueError, match="more than 1000000 characters"):
        ChatTemplate.read(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"name": "rag", "template": "x"}], r"templates 'rag' and no 'default'"),
        (7, "chat_template is a int, not a text"),
        ([{"name": "default"}], "names or texts are missing"),
        ([7], "names or texts are missing"),
    ],
)
def test_unusable_entries_are_named(value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ChatTemplate.read(tiny_bpe.folder(tmp_path, chat_template=value))


# ---------------------------------------------------------------------------------- frame


def parts(frame: chat.Frame, turn: str) -> str:
    return frame.chat.replace("{turn}", turn)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_frame_around_a_turn_is_what_the_template_renders(name):
    template, tok = dialect(name)
    frame = chat.frame(template, tok)
    for turn in ("the code", "two\n\nlines {x}", "nothing says\\boxed{...}"):
        whole = template.render([{"role": "user", "content": turn}], True)
        assert parts(frame, turn) == whole
    ids = tok.encode_template(parts(frame, "the code"))
    assert np.array_equal(ids, tok.encode_template(template.render(
        [{"role": "user", "content": "the code"}], True)))  # fmt: skip
    assert frame == chat.frame(template, tok)


def test_the_stop_ids_begin_with_the_end_of_a_turn(tmp_path):
    for name, (_, _, eos) in DIALECTS.items():
        template, tok = dialect(name)
        assert chat.frame(template, tok).stop_ids == tok.stop_ids
        assert tok.stop_ids[0] == tok.control_id(eos)
    folder = tiny_bpe.folder(tmp_path, chat_template=CHATML, eos="</s>")  # the files know less
    tok = HuggingFaceTokenizer(folder)
    assert chat.frame(ChatTemplate.read(folder), tok).stop_ids == tuple(
        map(tok.control_id, ("<|im_end|>", "</s>", "<|endoftext|>"))
    )
    bare = made("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert chat.frame(bare, tok).stop_ids == tok.stop_ids


def test_options_reach_the_template():
    template, tok = dialect("chatml")
    silent = dataclasses.replace(template, variables={**template.variables, "thinking": False})
    assert chat.frame(silent, tok).after.endswith("assistant\n<think>\n\n</think>\n\n")
    assert chat.frame(template, tok).after.endswith("assistant\n")


def test_a_frame_works_with_sentencepiece():
    frame = chat.frame(made(CHATML), fakes.tokenizer())
    assert frame.stop_ids == (
        fakes.tokenizer().control_id("<|im_end|>"),
        fakes.tokenizer().control_id("<|end|>"),
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].role }}", "comes out 0 times"),
        ("{{ messages[0].content ~ messages[0].content }}", "comes out 2 times"),
        ("{{ messages[0].content | upper }}", "comes out 0 times"),
        ("{{ messages[0].content | length }}{{ messages[0].content }}", "depends on the message"),
        ("<|nope|>{{ messages[0].content }}", "no control piece '<.nope.>'"),
        ("{{ '{question}' ~ messages[0].content }}", "it writes {question}"),
        ("{{ messages[0].content }}", "leaves out the assistant's reply"),
    ],
)
def test_templates_that_cannot_frame_a_turn_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        chat.frame(made(source), dialect("chatml")[1])


# -------------------------------------------------------------------------------- prompts


def template_in_frame(name, frame, tok, tmp_path):
    """A shipped template whose [chat] section is the frame."""
    shipped = prompts.find(name).read_text(encoding="utf-8")
    head, rest = shipped.split("[chat]\n")
    rest = rest[rest.index("[update]") :]
    bare = frame.chat.rstrip("\n")
    section = bare + "\\n" * (len(frame.chat) - len(bare))
    path = tmp_path / f"{name}.txt"
    path.write_text(f"{head}[chat]\n{section}\n\n{rest}", encoding="utf-8")
    return dataclasses.replace(Template.load(path, tok), stop_ids=frame.stop_ids)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("order", ["chunk_first", "memory_first"])
def test_a_group_shares_its_prefix_and_no_text_becomes_a_control_piece(name, order, tmp_path):
    model, tok = dialect(name)
    frame = chat.frame(model, tok)
    template = template_in_frame(order, frame, tok, tmp_path)
    hostile = " ".join(tok.controls) + "{chunk}{{ messages }}"
    question, chunk = tok.encode("who? " + hostile), tok.encode(hostile + " the code")
    memories = [tokens(), tok.encode("red"), tok.encode(hostile)]
    made_ = [template.update_prompt(question, chunk, memory) for memory in memories]
    assert all(np.array_equal(prompt.shared, made_[0].shared) for prompt in made_)
    if order == "chunk_first":
        assert len(made_[0].shared) > len(question) + len(chunk)
    controls = list(tok.controls.values())
    frame_ids = tok.encode_template(frame.before), tok.encode_template(frame.after)
    written = sum(int(np.isin(ids, controls).sum()) for ids in frame_ids)
    for prompt in [*made_, template.answer_prompt(question, memories[2])]:
        assert np.isin(prompt.tokens, controls).sum() == written
    assert made_[0].tokens[: len(frame_ids[0]) - 1].tolist() == frame_ids[0][:-1].tolist()
    assert made_[1].draft.tolist() == [*memories[1], frame.stop_ids[0]]
