"""A curriculum on chunks: what is read when, and that the questions do not change with it."""

import asyncio
import itertools
import json

import pytest

from notepad_jax.data import files
from notepad_jax.parallel import hosts
from notepad_jax.planner import workload
from notepad_jax.rollout.ledger import Ledger, Waiting
from notepad_jax.setup import builders, configuration, curriculum, task_stream
from notepad_jax.setup.lengths import in_windows
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import rollout_settings
from tests import fakes
from tests.runs import SMALL, WRITTEN, run
from tests.training.test_train_files import Said, run_and_listen

STAGES = "--config.tasks.curriculum=1@0,2@2"


def test_stages_by_hand():
    plan = curriculum.parsed(("4@0", "8@50", "0@100"))
    assert [plan.at(step) for step in (0, 49, 50, 99, 100, 10**6)] == [4, 4, 8, 8, 0, 0]
    assert (plan.shortest, plan.longest) == (4, 0)
    assert curriculum.parsed(()).at(7) == 0
    assert curriculum.parsed(("16@0", "4@3")).longest == 16


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("4", "has '4'; write CHUNKS@STEP"),
        ("4@0,x@3", "has 'x@3'"),
        ("-4@0", "has '-4@0'"),
        ("4@5", "begins at step 5; say what is read before it: CHUNKS@0"),
        ("4@0,8@9,16@9", "has step 9 behind step 9"),
    ],
)
def test_what_is_no_curriculum_is_refused_when_the_config_is_read(said, message):
    with pytest.raises(configuration.ConfigProblem, match=message):
        configuration.load("quickstart", [f"--config.tasks.curriculum={said}"])


def opened(*words):
    config = configuration.load("quickstart", [*SMALL, *words])
    screen = Said()
    tokenizer = builders.words(config.policy).tokenizer
    return task_stream.opened(config, tokenizer, screen), tokenizer, screen.lines


def test_what_never_comes_or_is_of_files_says_that_it_cannot_act():
    assert opened(STAGES)[2] == []  # 4 steps, and a stage from step 2 on
    (said,) = opened("--config.tasks.curriculum=1@0,2@4")[2]
    assert "a stage from step 4 on, which cannot act: the run ends with step 4" in said
    said = opened("--config.tasks.weights=a=2", "--config.tasks.max_tokens=256")[2]
    assert said == [
        f"tasks.{k} cannot act: tasks.files is empty" for k in ("weights", "max_tokens")
    ]


def test_a_document_that_is_made_shorter_has_the_questions_it_had():
    stream, tokenizer, _ = opened(STAGES)
    short, whole = stream.stage(1, 256), stream.stage(0, 256)
    for ordinal in (0, 5, 77):
        few, many = short.records.at(ordinal), whole.records.at(ordinal)
        assert [(t.question, t.answers) for t in few] == [(t.question, t.answers) for t in many]
        lengths = [
            sum(map(len, tokenizer.encode_pieces(tasks[0].document.pieces())))
            for tasks in (few, many)
        ]
        assert lengths == [256, 512]
    assert short.records.identity == whole.records.identity == stream.records.identity


@pytest.mark.parametrize(("ends", "tokens"), [("tokens", 2048), ("sentence", 1920)])
def test_stories_told_in_so_many_chunks_fit_them_also_where_these_end_with_sentences(ends, tokens):
    words = ["stories=niah_single_2,updates", "curriculum=1@0,2@2"]
    stream, tokenizer, _ = opened(
        *(f"--config.tasks.{word}" for word in words), "--config.data.questions=1",
        "--config.data.tokens=9000", f"--config.reading.chunk_ends={ends}",
    )  # fmt: skip
    for ordinal in range(3):
        (task,) = stream.stage(1, 2048).records.at(ordinal)
        found = sum(map(len, tokenizer.encode_pieces(task.document.pieces())))
        assert 0.98 * tokens < found <= tokens


def test_stories_are_told_in_documents_of_many_lengths():
    words = ["stories=niah_single_2", "min_tokens=1000", "curriculum=1@0,0@2"]
    stream, tokenizer, _ = opened(
        *(f"--config.tasks.{word}" for word in words), "--config.data.questions=1",
        "--config.data.tokens=9000", "--config.reading.chunk_size=2048",
    )  # fmt: skip

    def lengths(records):
        made = (records.at(ordinal)[0].document.pieces() for ordinal in range(24))
        return [sum(map(len, tokenizer.encode_pieces(pieces))) for pieces in made]

    found = lengths(stream.records)
    assert 0.98 * 1000 < min(found) < 1300 and 7000 < max(found) <= 9000
    # Half of them are shorter than the geometric mean, 3,000 (a binomial of 24: 5 to 19).
    assert 5 <= sum(length < 3000 for length in found) <= 19
    assert found == lengths(stream.records)
    assert max(lengths(stream.stage(1, 2048).records)) <= 2048


def test_stories_without_room_are_told_in_a_longer_document_or_refused_at_once():
    """Each draw is made, whatever its length: a run would end in its middle, and again there."""
    words = ("tasks.stories=niah_single_2,vt,updates,conflicts", "data.questions=3")

    def made(tokens, least, chunks="0@0"):
        more = (f"data.tokens={tokens}", f"tasks.min_tokens={least}", f"tasks.curriculum={chunks}")
        return opened(*(f"--config.{word}" for word in (*words, *more)))[0].records

    for tokens, least, ordinal in ((1900, 250, 14), (1900, 450, 26), (480, 0, 27)):
        tasks = made(tokens, least).at(ordinal)
        assert len(tasks) == 3 and made(tokens, least).at(ordinal) == tasks
    with pytest.raises(ValueError, match="cannot be 100 tokens long: there is no room for 3 stor"):
        made(100, 0)
    with pytest.raises(ValueError, match="cannot be 256 tokens long"):
        made(1900, 0, "1@0")


def test_stories_say_what_else_of_tasks_cannot_act():
    words = ["weights=a=2", "max_tokens=256", "balanced=true", "retire_at=0.5", "curriculum=9@0"]
    said = opened(*(f"--config.tasks.{word}" for word in ["stories=niah_single_2", *words]))[2]
    assert [line.split()[0] for line in said] == [f"tasks.{w.partition('=')[0]}" for w in words]
    with pytest.raises(configuration.ConfigProblem, match="tasks.files and tasks.stories both say"):
        opened("--config.tasks.stories=vt", "--config.tasks.files=a.jsonl")


def test_the_shortest_document_is_no_longer_than_the_longest():
    said = opened("--config.tasks.min_tokens=9")[2]
    assert said == ["tasks.min_tokens cannot act: tasks.stories is empty"]
    with pytest.raises(ValueError, match="tasks.min_tokens is 600 and data.tokens 512; the short"):
        opened("--config.tasks.stories=vt", "--config.tasks.min_tokens=600")


@pytest.mark.parametrize("words", [["tasks.stories=vt"], ["tasks.min_tokens=300"]])
def test_a_window_of_documents_of_one_length_cannot_act(words):
    words = ["rollout.window=2", *words]
    config = configuration.load("quickstart", [f"--config.{word}" for word in words])
    (line,) = rollout_settings.idle(config)
    said = "documents that are made are all of one length (data.tokens)"
    assert line == f"rollout.window=2 cannot act: {said}"


def test_a_window_of_stories_is_sorted_by_the_lengths_that_their_seeds_draw():
    words = ["stories=niah_single_2", "min_tokens=1000", "curriculum=1@0,0@2"]
    plain, tokenizer, _ = opened(
        *(f"--config.tasks.{word}" for word in words), "--config.data.questions=1",
        "--config.data.tokens=4000", "--config.reading.chunk_size=2048",
    )  # fmt: skip
    ours, length = in_windows(plain, tokenizer, 3, 4, 0)

    def made(stream):
        return [stream.records.at(ordinal)[0] for ordinal in range(12)]

    sizes = [length(ordinal) for ordinal in range(12)]
    for task, size in zip(made(ours), sizes, strict=True):
        pieces = tokenizer.encode_pieces(task.document.pieces())
        assert 0.97 * size < sum(map(len, pieces)) <= size
    batches = sorted((sizes[first : first + 4] for first in (0, 4, 8)), key=max)
    for shorter, longer in itertools.pairwise(batches):
        assert max(shorter) <= min(longer)
    assert {task.id for task in made(ours)} == {task.id for task in made(plain)}
    # In a stage the same draws, of shorter documents, stand at the same places.
    keys = [ours.records.key(ordinal) for ordinal in range(12)]
    staged = ours.stage(1, 2048)
    assert [staged.records.key(ordinal) for ordinal in range(12)] == keys
    for task in made(staged):
        assert sum(map(len, tokenizer.encode_pieces(task.document.pieces()))) <= 2048


def test_a_document_out_of_a_file_loses_its_middle(tmp_path):
    path = tmp_path / "tasks.jsonl"
    files.write(path, make_tasks(0, 1024, 2), itertools.repeat(1024))
    stream, tokenizer, _ = opened(f"--config.tasks.files={path}", "--config.tasks.max_tokens=600")
    for chunks, read in ((0, 600), (1, 256), (2, 512), (3, 600)):
        documents = stream.stage(chunks, 256).documents(tokenizer, 256, "tokens")
        made = documents(stream.records.at(3)[0])
        assert len(made[0]) == 256 and made.total_chunks == -(-read // 256)
        assert documents.truncated_tokens == 1024 - read


def test_a_stage_without_room_for_the_facts_is_refused_and_one_beyond_the_text_is_said():
    with pytest.raises(ValueError, match="a stage of 1 chunks, 24 tokens, and the facts of 2 que"):
        opened(STAGES, "--config.reading.chunk_size=24")
    assert opened(STAGES)[2] == []
    (line,) = opened("--config.tasks.curriculum=2@0,8@3")[2]
    assert "goes to 8 chunks, 2,048 tokens, and cannot act beyond data.tokens, which is 512" in line


@pytest.mark.parametrize(("said", "chunks"), [((), 8), (("1@0", "4@9"), 4), (("4@0", "0@9"), 8)])
def test_a_plan_counts_the_longest_stage(said, chunks):
    config = configuration.load("quickstart", [f"--config.tasks.curriculum={','.join(said)}"])
    words = builders.words(config.policy)
    assert workload.readings(config, builders.template(config.reading, words)).chunks == chunks


@pytest.fixture
def sampled():
    config = configuration.load("quickstart", [*SMALL, STAGES])
    words = builders.words(config.policy)
    template, rules = builders.template(config.reading, words), builders.rules(config.reading)
    stream = task_stream.opened(config, words.tokenizer, SilentScreen())
    completer = fakes.Scripted(lambda prompt, sampling: [sampling.seed % 7 + 270, 2])
    return rollout_settings.rollouts(config, stream, completer, words.tokenizer, template, rules)


def read(sampled, chunks, *ordinals):
    stage = sampled.stream.stage(chunks, 256)
    own = dict.fromkeys(ordinals[hosts.index() :: hosts.count()], 0)
    groups, failed = asyncio.run(sampled._read(stage, sampled.reader, own, 0))
    assert not failed
    return groups


def test_what_waits_is_made_again_as_long_as_it_was_read(sampled):
    """By then the run may be at another stage."""
    groups = [*read(sampled, 1, 0), *read(sampled, 2, 1)]
    ledger = Ledger(2, 4, {}, tuple(Waiting(group, 1.0) for group in groups))
    saved = json.loads(json.dumps(sampled.saved(ledger)))
    assert [one["chunks"] for one in saved["ledger"]["waiting"]] == [1, 1, 2, 2]
    again = sampled.restored(saved)
    for one, other in zip(ledger.waiting, again.waiting, strict=True):
        assert one.group.chunks == other.group.chunks
        turns = [group.trajectories[0].turns for group in (one.group, other.group)]
        assert len(turns[0]) == len(turns[1]) == one.group.chunks + 1
    saved["ledger"]["waiting"][0]["chunks"] = 2
    with pytest.raises(ValueError, match="its prompts come out otherwise"):
        sampled.restored(saved)


def test_of_two_processes_each_makes_again_what_the_other_read_at_this_stage(sampled, monkeypatch):
    alone = read(sampled, 1, 4, 5, 6)
    told = []
    monkeypatch.setattr(hosts, "count", lambda: 2)
    monkeypatch.setattr(hosts, "index", lambda: 1)
    nobody = json.dumps({"value": {"groups": [], "failed": []}}).encode()
    monkeypatch.setattr(hosts, "gather", lambda said: [nobody, told.append(said) or said])
    assert [group.ordinal for group in read(sampled, 1, 4, 5, 6)] == [5, 5]
    monkeypatch.setattr(hosts, "index", lambda: 0)
    monkeypatch.setattr(hosts, "gather", lambda said: [said, *told])
    both = read(sampled, 1, 4, 5, 6)
    assert [group.place for group in both] == [group.place for group in alone]
    for one, other in zip(both, alone, strict=True):
        assert one.chunks == other.chunks == 1 and one.task == other.task
        assert one.rewards.tolist() == other.rewards.tolist()
        for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
            assert [t.prompt.tokens.tolist() for t in mine.turns] == [
                t.prompt.tokens.tolist() for t in theirs.turns
            ]


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_at_its_stage(tmp_path):
    words = (STAGES, "--config.rollout.max_staleness=1", "--config.rollout.max_rounds=3")
    whole, said = run_and_listen(tmp_path / "whole", *words)
    assert [m["data/max_chunks"] for m in whole] == [1, 1, 2, 2]
    for m in whole[:2]:
        assert m["rollout/update_turns"] == m["rollout/trajectories"]
    assert any(m["groups/waiting"] for m in whole[:3]), "nothing waited; choose another seed"
    assert [line for line in said if "tasks.curriculum" in line] == [
        "from step 1 on, documents have at most 1 chunk (tasks.curriculum)",
        "from step 3 on, documents have at most 2 chunks (tasks.curriculum)",
    ]
    waited = next(m["step"] for m in whole if m["groups/waiting"])
    run(tmp_path / "parts", *words, f"--config.steps={waited}")
    assert run(tmp_path / "parts", *words, resume=True) == whole
    for name in WRITTEN:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
