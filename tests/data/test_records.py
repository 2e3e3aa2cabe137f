"""Generated samples: epochs that forget nothing, fresh seeds, other streams refused."""

import json

import pytest

from notepad_jax.data.records import Records, generated
from notepad_jax.types import Task, TextDocument


def make(seed: int) -> tuple[Task, ...]:
    """Two questions about one document, named after its seed."""
    document = TextDocument(f"the code is {seed} .")
    return tuple(
        Task(f"{seed}/{k}", "code ?", document, (str(seed),), "test", "em") for k in range(2)
    )


def draw(records: Records, count: int, first: int = 0) -> list[str]:
    return [records.at(ordinal)[0].id for ordinal in range(first, first + count)]


def test_samples_are_whole_documents_and_seeded():
    first, again, other = (generated(make, seed) for seed in (3, 3, 4))
    sample = first.at(0)
    assert sample[0].document is sample[1].document
    assert draw(first, 20) == draw(again, 20) != draw(other, 20)


def test_every_epoch_has_all_documents_and_is_shuffled_anew():
    records = generated(make, 1, documents=range(100, 111))
    first, second = draw(records, 11), draw(records, 11, 11)
    assert sorted(first) == sorted(second) == sorted(f"{seed}/0" for seed in range(100, 111))
    assert first != second


def test_no_two_samples_have_the_same_seed():
    records = generated(make, 0)
    assert len(set(draw(records, 2000))) == 2000


def test_a_foreign_state_is_refused():
    saved = json.loads(json.dumps(generated(make, 5).identity))
    generated(make, 5).check(saved)
    with pytest.raises(ValueError, match="seed = 5 and the run has 6"):
        generated(make, 6).check(saved)
    generated(make, 5).check(saved | {"shard_index": 0, "shard_count": 1})  # of older versions


def test_settings_are_checked():
    with pytest.raises(ValueError, match="seed is -1"):
        generated(make, -1)


def test_the_stream_is_what_it_always_was():
    # Runs are repeated from their seed.
    records = generated(make, 3)
    assert draw(records, 4) == ["686117158/0", "830828735/0", "167877518/0", "325443087/0"]
