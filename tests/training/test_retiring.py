"""Training on files whose tasks retire, in batches of equal numbers of each source."""

import itertools
import json

import pytest

from notepad_jax.data import files
from notepad_jax.rollout.ledger import Ledger, Outcome
from notepad_jax.rollout.pass_rates import PassRates
from notepad_jax.setup import builders, configuration, task_stream
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import LEDGER
from notepad_jax.training import rollout_settings
from tests import fakes
from tests.runs import SMALL, WRITTEN, run
from tests.training.test_train_files import Said, run_and_listen


@pytest.fixture
def two_kinds(tmp_path):
    """Six tasks of one kind and four of the other."""
    tasks = [task for seed in range(30) for task in make_tasks(seed, 512, 2)]
    for kind, count in (("one_hop", 6), ("two_hop", 4)):
        chosen = [task for task in tasks if task.source.endswith(kind)][:count]
        files.write(tmp_path / f"{kind}.jsonl", chosen, itertools.repeat(512))
    return f"--config.tasks.files={tmp_path / 'one_hop.jsonl'},{tmp_path / 'two_hop.jsonl'}"


def opened(*words):
    config = configuration.load("quickstart", [*SMALL, *words])
    screen = Said()
    stream = task_stream.opened(config, builders.words(config.policy).tokenizer, screen)
    return stream, screen.lines


BALANCED, RETIRE = "--config.tasks.balanced=true", "--config.tasks.retire_at=0.9"


def test_what_cannot_act_says_so_and_what_does_not_go_together_is_refused(two_kinds):
    stream, said = opened(BALANCED, RETIRE)
    assert stream.balanced == () and not stream.records.tasks
    assert ["never drawn twice" in line for line in said] == [False, True]
    assert "tasks.balanced cannot act: documents that are made" in said[0]
    one = two_kinds.partition(",")[0]
    assert "there is one source, synthetic/one_hop" in opened(one, BALANCED)[1][0]
    stream, said = opened(two_kinds, BALANCED, RETIRE)
    assert stream.balanced == ("synthetic/one_hop", "synthetic/two_hop") and not said
    assert stream.records.tasks == {"synthetic/one_hop": 6, "synthetic/two_hop": 4}
    with pytest.raises(ValueError, match="tasks.weights says synthetic/one_hop=3, .*use one of"):
        opened(two_kinds, BALANCED, "--config.tasks.weights=synthetic/one_hop=3")


def test_a_stream_knows_its_tasks_without_reading_them(two_kinds):
    records = opened(two_kinds)[0].records
    for ordinal in range(20):
        source, number = records.key(ordinal)
        assert records.at(ordinal)[0].source == source and 0 <= number < records.tasks[source]
    again = {}
    for ordinal in range(40):
        assert again.setdefault(records.key(ordinal), records.at(ordinal)[0].id) == (
            records.at(ordinal)[0].id
        )
    assert len(again) == 10


def test_who_goes_on_without_retiring_draws_all_tasks_again(two_kinds):
    for word, retires in ((RETIRE, True), ("--config.tasks.retire_at=0.0", False)):
        config = configuration.load("quickstart", [*SMALL, two_kinds, word])
        words = builders.words(config.policy)
        sampled = rollout_settings.rollouts(
            config, task_stream.opened(config, words.tokenizer, Said()), fakes.empty(),
            words.tokenizer, builders.template(config.reading, words),
            builders.rules(config.reading),
        )  # fmt: skip
        first = sampled.stream.records.key(0)
        ledger = Ledger(rates=PassRates({first: (4.0, 4)}, frozenset({first})))
        again = sampled.restored(json.loads(json.dumps(sampled.saved(ledger))))
        assert again == ledger and sampled._stream(again).retired(0) is retires


@pytest.mark.slow
def test_a_run_that_was_ended_passes_over_what_had_retired(two_kinds, tmp_path):
    words = (
        two_kinds, BALANCED, "--config.tasks.retire_at=0.3", "--config.rollout.documents=4",
        "--config.rollout.max_staleness=1", "--config.steps=5",
        "--config.grpo.advantage=task_std", "--config.grpo.scale_memory=0.9",
    )  # fmt: skip
    whole, said = run_and_listen(tmp_path / "whole", *words)
    assert whole[-1]["tasks/retired"] <= 3 + 2 and whole[-1]["tasks/retired"] > 0
    assert sum(m["groups/passed_retired"] for m in whole) > 0
    lines = [json.loads(line) for line in (tmp_path / "whole" / LEDGER).open()]
    settled = [tuple(p) for line in lines for one in Outcome for p in line.get(one.value, ())]
    waiting = [tuple(place) for place in lines[-1]["waiting"]]
    assert sorted(settled + waiting) == [(o, 0) for o in range(lines[-1]["drawn"][1])]
    records = opened(two_kinds)[0].records
    for line in lines:
        kinds = [records.key(ordinal)[0] for ordinal, _ in line.get("trained", ())]
        assert all(kinds.count(kind) <= 2 for kind in kinds)
    assert len([line for line in said if "tasks.retire_at" in line]) <= 1
    run(tmp_path / "parts", *words, "--config.steps=3")
    assert run(tmp_path / "parts", *words, resume=True) == whole
    for name in WRITTEN:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
