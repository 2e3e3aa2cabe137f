"""The page of a trace: everything arrives, in files of bounded size, and nothing breaks out."""

import base64
import hashlib
import json
import re

import pytest

from notepad_jax.reading.trace import Kept, MemoryChange, Spool, Trace, TraceFile
from notepad_jax.report import render, trace_page
from notepad_jax.report.trace_page import COLUMNS, INDEX, PAGE, TraceSource
from tests.report.made_traces import (
    HOSTILE,
    endless,
    evaluation,
    hostile,
    parallel,
    training,
    turn,
)

PART = re.compile(r"trace\.part\((\"[^\"]+\"),(.*)\);")


def page(*paths):
    """Returns (what was made, the page's files, its parts with the number of their file)."""
    files, traces = {}, [Trace(path) for path in paths]
    sources = [TraceSource(path.stem, trace) for path, trace in zip(paths, traces, strict=True)]
    made = trace_page.make(files.__setitem__, "a <b> title", sources)
    for trace in traces:
        trace.__exit__()
    parts = {}
    for name, content in files.items():
        if name == PAGE:
            continue
        for line in content.decode("ascii").splitlines():
            called, value = PART.fullmatch(line).groups()
            parts[json.loads(called)] = (name, json.loads(value))
    return made, files, parts


def rows(parts):
    index = parts["index"][1]
    return [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]


@pytest.mark.parametrize("make", [training, evaluation, hostile, lambda p: endless(p, 300)])
def test_every_memory_and_every_turn_arrives_at_the_place_that_the_head_names(make, tmp_path):
    path = make(tmp_path / "made.jsonl")
    _, _, parts = page(path)
    with Trace(path) as trace:
        for number, row in enumerate(rows(parts)):
            whole = trace.whole(number)
            file, head = parts[f"r{number}"]
            assert file == trace_page.PART.format(trace_page.DATA, row["file"])
            assert head["fields"] == whole.reading
            for change, (*told, block, place) in zip(whole.memories, head["changes"], strict=True):
                file, texts = parts[f"m{number}.{block}"]
                assert file == trace_page.PART.format(trace_page.DATA, head["memory_files"][block])
                assert (told[0], told[1], texts[place]) == (
                    change.chunk, change.tokens, change.memory,
                )  # fmt: skip
            for turn, (*told, block, place) in zip(whole.turns, head["turns"], strict=True):
                file, long = parts[f"t{number}.{block}"]
                assert file == trace_page.PART.format(trace_page.DATA, head["turn_files"][block])
                assert long[place] == [
                    turn.shared, turn.tail, turn.tokens, turn.logprobs, turn.proximal,
                ]  # fmt: skip
                assert told[9] == (0.1 if turn.chunk == 1 else None)  # the largest gap
                assert told[0] == turn.chunk and told[7] == 5  # 3 shared, wherever, and 2


def test_readings_of_one_question_are_known_from_each_other(tmp_path):
    one, two = training(tmp_path / "one.jsonl", groups=2), training(tmp_path / "two.jsonl")
    made, files, parts = page(one, two, evaluation(tmp_path / "other.jsonl"))
    found = rows(parts)
    assert [row["group"] for row in found] == [0, 0, 1, 1, 2, 2, 3]
    assert [row["asked"] for row in found] == [0] * 6 + [1]
    assert [row["source"] for row in found] == [0] * 4 + [1] * 2 + [2]
    # Who has the shared part of a prompt is told by the page's numbers.
    assert [parts[f"r{k}"][1]["turns"][0][8] for k in range(6)] == [None, 0, None, 2, None, 4]
    assert (made.readings, made.turns, made.files) == (7, 6 * 4 + 3, len(files))
    assert made.bytes == sum(map(len, files.values()))


def test_the_index_calls_a_thing_by_one_name_whoever_wrote_it(tmp_path):
    _, _, parts = page(
        training(tmp_path / "one.jsonl"),
        evaluation(tmp_path / "two.jsonl", finish="length", lost="overwritten", correct=0.25),
        evaluation(tmp_path / "three.jsonl", failed=True, finish="cancelled"),
    )
    first, second, read, failed = rows(parts)
    assert set(first) == set(COLUMNS)
    assert (first["reward"], second["reward"], read["reward"]) == (1, 0, 0.25)
    assert (first["status"], read["status"], failed["status"]) == (
        "answered", "truncated", "failed",
    )  # fmt: skip
    assert (second["sample"], second["advantage"], second["version"]) == (1, -0.5, 3)
    assert (read["length"], read["lost"], read["advantage"]) == (2048, "overwritten", None)
    assert first["kept"] and not read["kept"]
    assert (first["method"], read["method"]) == (None, "notepad")


def test_facts_are_looked_for_in_every_memory(tmp_path):
    _, _, parts = page(training(tmp_path / "one.jsonl"))
    held = [[change[4] for change in parts[f"r{k}"][1]["changes"]] for k in (0, 1)]
    assert held == [["1", "1"], ["1", "0"]]  # "king", which "Rex sleeps" lacks
    sums = [[change[5] for change in parts[f"r{k}"][1]["changes"]] for k in (0, 1)]
    assert sums[0][0] == sums[1][0] and sums[0][1] != sums[1][1]  # where they part


def test_the_tree_of_a_parallel_reading_says_where_a_fact_was_lost(tmp_path):
    _, _, parts = page(parallel(tmp_path / "one.jsonl"), training(tmp_path / "two.jsonl"))
    first, second = parts["r0"][1]["rounds"]
    assert first["lines"] == [[0, 1, 0], [0, 2, 0]] and first["memory"] == [1, 0]
    told = [[(cell["holds"], cell["lost"]) for cell in level] for level in first["levels"]]
    assert told == [[(0, 0), (1, 0), (1, 0)], [(1, 1)]]
    assert second["memory"] is None
    assert parts["r1"][1]["rounds"] == []


def test_a_reading_of_thousands_of_turns_lies_in_files_of_bounded_size(tmp_path):
    made, files, parts = page(endless(tmp_path / "long.jsonl", 2000, 120))
    assert made.turns == 2000 and len(parts["r0"][1]["changes"]) == 1999
    sizes = {name: len(content) for name, content in files.items()}
    assert sizes[INDEX] < 1000
    head = len(json.dumps(parts["r0"][1]))
    assert head < 2000 * 70
    assert max(sizes.values()) <= max(1.1 * trace_page.BLOCK, head)


def test_nothing_that_anybody_wrote_breaks_out(tmp_path):
    _, files, _ = page(hostile(tmp_path / "made.jsonl"))
    text = files.pop(PAGE).decode()
    for content in files.values():
        assert b"<" not in content and not re.search(rb"[^\n\x20-\x7e]", content)
    assert HOSTILE not in text and "a &lt;b&gt; title" in text
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1 and text.count("<script") == 2  # and the index
    hashed = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'self' file: '{hashed}" in (
        text.replace("sha256-", "")
    )
    for unsafe in (
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
        "http:",
        "https:",
    ):
        assert unsafe not in text


def test_the_files_of_the_script_are_those_that_are_shipped():
    loader = render._ENVIRONMENT.loader
    there = {name for name in loader.list_templates() if name.endswith(".js")}
    assert there == {
        *render.TRACE_SCRIPTS,
        *render.READING_SCRIPTS,
        render.SCRIPT,
        render.NOTICE_SCRIPT,
    }


def test_a_prompt_that_nobody_has_is_named(tmp_path):
    path = training(tmp_path / "made.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[1])
    with pytest.raises(ValueError, match="prompts begin as those of reading 0"):
        page(path)


def test_a_member_with_prompts_of_its_own_is_between_those_that_share_them(tmp_path):
    """The second shares none of its turns, and the third one of them."""
    path = tmp_path / "trajectories.jsonl"
    own = [turn(0), turn(1, "answer"), turn(1, "answer")]
    members = [[turn(0), turn(1)], own, [turn(0, shared_of=0), turn(1)], [turn(1, shared_of=0)]]
    with TraceFile(path) as file:
        for kept in members:
            file.add({}, Spool([]), Kept(Spool(kept), {}))
    _, _, parts = page(path)
    for number, kept in enumerate(members):
        found = [row[7] for row in parts[f"r{number}"][1]["turns"]]  # tokens of the prompt
        assert found == [3 + 2] * len(kept)


def test_a_trace_can_be_looked_at_while_it_is_written(tmp_path):
    path = tmp_path / "made.jsonl"
    with TraceFile(path) as writing:
        writing.add({"name": 1}, Spool([MemoryChange(0, "a", 1)]))
        before = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"reading": {"na')
        with Trace(path) as trace:
            assert len(trace) == 1 and trace.whole(0).memories == [MemoryChange(0, "a", 1)]
        assert path.read_bytes() == before + b'{"reading": {"na'
