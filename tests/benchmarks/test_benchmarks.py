"""The benchmarks at toy size: that they run and that what they compare is exact, not how fast."""

import asyncio
import json

import pytest

from benchmarks import (
    evaluation_cost,
    grpo_step,
    packing,
    reading_cost,
    serving,
    sharing,
    streams,
    trace_page,
)


@pytest.mark.slow
def test_sharing_is_exact_and_saves_the_tokens_it_should():
    config = sharing.policy_config(width=32, layers=2, heads=2, kv_heads=1, vocab=64)
    sizes = sharing.Sizes(groups=1, members=4, prefix=96, tail=8, completion=4)
    found = sharing.compare(config, sizes, repeats=2)  # asserts equal completions and gradients
    assert found["prefill_tokens_on"] == 96 + 4 * 8
    assert found["prefill_tokens_off"] == 4 * (96 + 8)
    assert found["update_tokens_on"] == 96 + 4 * 12


@pytest.mark.slow
def test_a_step_learns_from_what_it_sampled():
    for steps in grpo_step.measure(3, peer=False).values():
        assert max(step["gap"] for step in steps) < 1e-5  # on policy, in the third step too
        assert all(0 < step["rollout"] < step["step"] for step in steps)
        assert 0 < grpo_step.summary(steps, None)["update"]


def test_packing_counts_what_it_packed(capsys):
    packing.main(["--groups=2", "--members=2", "--chunks=1", "--steps=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    least = 2 * (5000 + 40 + 2 * 2 * (600 + 100))  # memories are at least 100 tokens
    assert least <= found["packed_tokens"] < least + 2 * 2 * 2 * 924


@pytest.mark.slow
def test_a_page_has_every_turn_in_files_of_bounded_size(capsys):
    trace_page.main(["--turns=200", "--words=50", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == 200 and found["largest_file_kb"] < 200


def test_exponent_of_a_straight_line():
    assert reading_cost.exponent([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert reading_cost.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


@pytest.mark.slow
def test_reading_cost_reads_every_token():
    desk = reading_cost.Desk("data/starter", chunk_size=64, documents=2, questions=3)
    points = asyncio.run(reading_cost.cost(desk, [256, 512], least_tokens=1024))
    assert [point["repeats"] for point in points] == [2, 1]
    for point in points:
        read = point["document_tokens_per_cpu_second"] * point["cpu_seconds"]
        assert read == pytest.approx(2 * point["length"])


def test_an_evaluation_without_a_policy_reads_every_token_in_constant_memory():
    points = evaluation_cost.cost([8192, 65536], documents=2)
    assert [point["turns"] for point in points] == [2 * (2 + 1), 2 * (14 + 1)]
    for point in points:
        read = point["document_tokens_per_cpu_second"] * point["cpu_seconds"]
        assert 0.98 * 2 * point["length"] < read <= 2 * point["length"]


@pytest.mark.slow
def test_streams_are_open_side_by_side_and_all_their_chunks_are_seen(capsys):
    streams.main(["--streams=20", "--tokens=9", "--pause=0.1", "--per-launch=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["chunks"] == 20 * 5  # of two tokens, and one of the last
    assert found["p50_ms"] > 30 and found["core_share"] > 0
    seconds = found["chunks"] / found["chunks_per_second"]
    assert found["tokens_per_second"] == pytest.approx(20 * 9 / seconds)


@pytest.mark.slow
def test_serving_asks_the_same_every_way(tmp_path):
    folder = serving.random_policy(tmp_path, width=64, layers=1)
    work = serving.Work(vocab=600, prompt=8, made=6, requests=1)
    found = asyncio.run(serving.ours(folder, [1, 2], work))
    assert set(found) == {1, 2}
    for speeds in found.values():
        assert min(speeds[way] for way in ("bare", "unread", "seat", "whole", "streamed")) > 0
