"""Windows: a permutation within each, the same draws, and what a run's position says of them."""

import itertools
import json

import numpy as np
import pytest

from notepad_jax.data import files, task_sources
from notepad_jax.data.records import of_files
from notepad_jax.setup.lengths import permutation, windowed
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import Task, TextDocument

STEPS, DOCUMENTS = 4, 3
SIZE = STEPS * DOCUMENTS


def make(tmp_path, count=10, name="tasks.jsonl", word="a "):
    tasks = [
        Task(f"t{k}", "who ?", TextDocument(word * (k + 1)), ("a",), "test", "em")
        for k in range(count)
    ]
    files.write(tmp_path / name, tasks, itertools.repeat(0))
    sources = task_sources.by_source([tmp_path / name], SilentScreen())
    return of_files(sources, 5)


def in_windows(records, steps=STEPS, documents=DOCUMENTS, seed=5, asked=None):
    def length(place):
        if asked is not None:
            asked.append(place)
        return 1 + records.key(place)[1]

    return windowed(records, length, steps, documents, seed)


def drawn(records, places):
    return [records.at(place)[0].id for place in places]


def test_each_window_has_its_own_draws_and_each_once(tmp_path):
    plain = make(tmp_path)
    ours = in_windows(plain)
    moved = 0
    for first in range(0, 5 * SIZE, SIZE):
        places = range(first, first + SIZE)
        assert sorted(drawn(ours, places)) == sorted(drawn(plain, places))
        moved += drawn(ours, places) != drawn(plain, places)
    assert moved == 5
    assert [ours.key(k) for k in range(SIZE)] == [
        ("test", int(name[1:])) for name in drawn(ours, range(SIZE))
    ]


def test_a_windows_longest_meet_in_one_batch_in_the_streams_order():
    rng = np.random.default_rng(1)
    for first in range(0, 10 * SIZE, SIZE):
        lengths = rng.integers(1, 50, SIZE).tolist()
        found = permutation(lengths, STEPS, 3, first)
        batches = [found[k : k + DOCUMENTS] for k in range(0, SIZE, DOCUMENTS)]
        assert all(batch == sorted(batch) for batch in batches)
        batches.sort(key=lambda batch: -max(lengths[k] for k in batch))
        for long, short in itertools.pairwise(batches):
            assert min(lengths[k] for k in long) >= max(lengths[k] for k in short)
        # A batch waits for its longest: never longer in all than as the stream has them.
        waited = sum(max(lengths[k] for k in batch) for batch in batches)
        assert waited <= sum(max(lengths[k : k + DOCUMENTS]) for k in range(0, SIZE, DOCUMENTS))


def test_chance_orders_the_batches_by_the_seed_and_the_first_place_alone(tmp_path):
    lengths = list(range(SIZE))
    at = {permutation(lengths, STEPS, 3, first)[0] for first in range(0, 40 * SIZE, SIZE)}
    assert at == {0, 3, 6, 9}  # every batch comes first in some window
    assert permutation(lengths, STEPS, 3, SIZE) == permutation(lengths, STEPS, 3, SIZE)
    seeds = {tuple(permutation(lengths, STEPS, seed, 0)) for seed in range(8)}
    assert len(seeds) > 4
    # Asked for in any order, from within a window, by another process: the same.
    places = list(range(4 * SIZE))
    whole = drawn(in_windows(make(tmp_path)), places)
    late = in_windows(make(tmp_path))
    assert drawn(late, places[::-1])[::-1] == whole
    assert drawn(in_windows(make(tmp_path)), places[SIZE + 5 :]) == whole[SIZE + 5 :]


def test_of_one_length_draws_keep_their_order_within_batches_and_of_one_step_all_do(tmp_path):
    for documents in (DOCUMENTS, 100):
        found = permutation([7] * (STEPS * documents), STEPS, 0, 0)
        batches = np.array(found).reshape(STEPS, documents)
        assert (np.diff(batches, axis=1) == 1).all() and (batches[:, 0] % documents == 0).all()
    # Of two lengths, half of 300 draws each: the first hundred of the longer make a batch.
    found = np.array(permutation([7, 5] * 150, 3, 0, 0)).reshape(3, 100)
    assert list(range(0, 200, 2)) in found.tolist()
    plain, asked = make(tmp_path), []
    assert in_windows(plain, steps=1, asked=asked) is plain and not asked


def test_a_window_by_hand():
    # 9, 8 | 7, 5 | 3, 1 by length; in the stream's order each; chance: the second, last, first.
    found = permutation([5, 9, 1, 7, 3, 8], 3, 0, 0)
    assert sorted(zip(found[::2], found[1::2], strict=True)) == [(0, 3), (1, 5), (2, 4)]


def test_a_window_looks_at_its_own_documents_once(tmp_path):
    asked = []
    ours = in_windows(make(tmp_path), asked=asked)
    drawn(ours, range(SIZE))
    assert asked == list(range(SIZE))
    with pytest.raises(ValueError, match="no ordinal -1"):
        ours.at(-1)


def saved(records):
    return json.loads(json.dumps(records.identity))


def test_a_position_within_windows_is_that_of_the_same_windows(tmp_path):
    plain = make(tmp_path)
    ours = in_windows(plain)
    ours.check(saved(ours))
    assert "window" not in plain.identity
    for mine, theirs, said in (
        (ours, plain, "saved without windows, and the run goes on in windows of 4 steps of 3"),
        (plain, ours, "saved in windows of 4 steps of 3 documents, .* goes on without windows"),
        (in_windows(plain, documents=4), ours, "of 3 documents, .* of 4 steps of 4 documents"),
        (in_windows(plain, steps=2), ours, "rollout.window and rollout.documents of the saved"),
    ):
        with pytest.raises(ValueError, match=said):
            mine.check(saved(theirs))


def test_mended_rows_may_be_of_another_length_so_windows_refuse_them(tmp_path):
    ours = in_windows(make(tmp_path))
    mended = make(tmp_path, name="mended.jsonl", word="bb ")
    mended.check(saved(ours) | {"window": None}, mended=True)
    with pytest.raises(ValueError, match="rollout.window sorts draws .* without --mended"):
        in_windows(mended).check(saved(ours), mended=True)
    in_windows(make(tmp_path)).check(saved(ours), mended=True)  # nothing was
