"""The data position: exact resume, shards that neither overlap nor forget, fresh seeds."""

import itertools

import pytest

from notepad_jax.data.records import Records, generated
from notepad_jax.types import Task, TextDocument


def make(seed: int) -> tuple[Task, ...]:
    """Two questions about one document, named after its seed."""
    document = TextDocument(f"the code is {seed} .")
    return tuple(
        Task(f"{seed}/{k}", "code ?", document, (str(seed),), "test", "em") for k in range(2)
    )


def draw(records: Records, count: int) -> list[str]:
    return [sample[0].id for sample in itertools.islice(records, count)]


def test_samples_are_whole_documents_and_seeded():
    first, again, other = (generated(make, seed) for seed in (3, 3, 4))
    sample = next(first)
    assert sample[0].document is sample[1].document
    assert draw(first, 20) == draw(again, 21)[1:] != draw(other, 21)[1:]


@pytest.mark.parametrize("position", [0, 1, 7, 19])
def test_resume_is_exact_across_epochs(position):
    records = generated(make, 5, documents=range(8))
    draw(records, position)
    state = records.get_state()
    expected = draw(records, 20)
    resumed = generated(make, 5, documents=range(8))
    draw(resumed, 3)
    resumed.set_state(state)
    assert draw(resumed, 20) == expected
    records.set_state(state)
    assert draw(records, 20) == expected


def test_shards_are_disjoint_and_complete_and_reshuffled():
    shards = [generated(make, 1, index, 3, documents=range(100, 111)) for index in range(3)]
    epochs = [
        (draw(shard, size), draw(shard, size))
        for shard, size in zip(shards, (4, 4, 3), strict=True)
    ]
    seen = [name for first, _ in epochs for name in first]
    assert sorted(seen) == sorted(f"{seed}/0" for seed in range(100, 111))
    assert all(sorted(first) == sorted(second) for first, second in epochs)
    assert any(first != second for first, second in epochs)


def test_no_two_samples_have_the_same_seed():
    records = generated(make, 0)
    assert len(set(draw(records, 2000))) == 2000


def test_a_foreign_state_is_refused():
    state = generated(make, 5, 0, 2).get_state()
    with pytest.raises(ValueError, match="seed = 5 and the run has 6"):
        generated(make, 6, 0, 2).set_state(state)
    with pytest.raises(ValueError, match="shard_index = 0 and the run has 1"):
        generated(make, 5, 1, 2).set_state(state)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="shard 2 of 2"):
        generated(make, 0, 2, 2)
    with pytest.raises(ValueError, match="seed is -1"):
        generated(make, -1)
    with pytest.raises(ValueError, match="2 documents cannot be split over 3 shards"):
        generated(make, 0, 0, 3, documents=range(2))


def test_the_stream_and_its_state_are_what_they_always_were():
    # Checkpoints of earlier versions hold such states, and runs are repeated from their seed.
    records = generated(make, 3)
    assert draw(records, 4) == ["686117158/0", "830828735/0", "167877518/0", "325443087/0"]
    assert records.get_state() == (
        b'{"identity": {"seed": 3, "shard_index": 0, "shard_count": 1, '
        b'"documents": [0, 2147483648, 1]}, "grain": {"next_index": 4}}'
    )
