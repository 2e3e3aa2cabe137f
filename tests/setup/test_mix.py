"""Config mix: its documents fit its chunks and limits, in training and where it is measured."""

from __future__ import annotations

from notepad_jax.setup import builders, configuration, eval_jobs, task_stream
from notepad_jax.starter import mixed
from notepad_jax.telemetry.progress import choose
from notepad_jax.training import validation

WORDS = ["--config.policy=data/starter"]  # its words are those of the mix's own starter


def opened():
    config = configuration.load("mix", WORDS)
    tokenizer = builders.words(config.policy).tokenizer
    return config, tokenizer, task_stream.opened(config, tokenizer, choose(quiet=True))


def test_every_kind_is_drawn_and_a_chunk_tells_one_fact_of_a_question():
    config, tokenizer, stream = opened()
    metrics = set()
    for ordinal in range(12):
        tasks = stream.records.at(ordinal)
        assert len(tasks) == config.data.questions
        chunks = list(stream.documents(tokenizer, config.reading.chunk_size, "tokens")(tasks[0]))
        assert [len(chunk) for chunk in chunks] == [64] * 8
        said = [tokenizer.decode(chunk).split() for chunk in chunks]
        for task in tasks:
            metrics.add(task.metric)
            name = task.question.split()[2]
            assert max(chunk.count(name) for chunk in said) <= 1
            # Words of a list, a new line between two, and the stop token.
            assert 2 * len(task.answers) <= config.reading.max_answer
    assert metrics == {kind.metric for kind in mixed.OF_NAME.values()}


def test_what_is_measured_is_held_out_and_as_long_as_it_says():
    config, tokenizer, stream = opened()
    trained = {stream.records.at(ordinal)[0].document.seed for ordinal in range(50)}
    held = {item.task for item in validation.items(config, stream, tokenizer, choose(quiet=True))}
    assert len(held) == config.validation.samples
    for length in eval_jobs.lengths_of(config):
        held |= set(eval_jobs.tasks_of_length(config, length))
    assert not trained & {task.document.seed for task in held}
    assert {task.document.length * 8 for task in held} == {512, 4096}
    assert len({task.id for task in held}) == len(held)
