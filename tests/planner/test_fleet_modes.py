"""`plan --fleet`: lengths, rates out of a plan, and what is said of modes in the end."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from notepad_jax import cli
from notepad_jax.commands.parser import build_parser
from notepad_jax.planner import (
    arithmetic,
    chips,
    fleet_lengths,
    fleet_modes,
    fleet_rates,
    lowering,
    plan_table,
    planned_policy,
)
from notepad_jax.planner.fleet import PINNED
from notepad_jax.setup import configuration

ROOT = Path(__file__).parents[2]
CHIP, SLICE = chips.CHIPS["v5p"], "v5p:2x2x1"


@pytest.fixture(scope="module")
def made():
    """The shipped policy on one device, in chunks of 256 tokens with memories of 8."""
    config = configuration.load("quickstart", ["--config.engine.pages=600"])
    there = jax.devices()[:1]
    return lowering.plan_of(config, there, policy=planned_policy.policy_of(config, "cpu"))


@pytest.fixture(scope="module")
def compared():
    return fleet_modes.compare(asked("all", "1k-16k"))


def asked(parts, form, *words):
    config = configuration.load("quickstart", words)
    return fleet_modes.asked(config, SLICE, fleet_modes.splits(parts), form)


# ---------------------------------------------------------------- lengths


def draw(form, usual=4096, count=4000):
    return fleet_lengths.lengths(form, usual)(np.random.default_rng(0), count)


def test_lengths_without_a_form_are_equal():
    assert set(draw(None)) == {4096}


def test_log_uniform_lengths_have_as_many_in_every_octave():
    found = draw("1k-16k")
    assert 1024 <= min(found) and max(found) <= 16384
    octaves = np.bincount(np.log2(found / 1024).clip(0, 3.999).astype(int)) / len(found)
    assert octaves == pytest.approx([0.25] * 4, abs=0.03)


@pytest.mark.parametrize("shape", [0.7, 1, 1.3, 3])
def test_pareto_lengths_have_the_mean_of_the_config_and_end_at_their_longest(shape):
    found = draw(f"pareto:{shape}:1m", count=400_000)
    assert max(found) <= 2**20 and np.mean(found) == pytest.approx(4096, rel=0.05)
    # P(X > x) = (least / x) ** shape
    least = min(found)
    assert np.mean(found > 4 * least) == pytest.approx(4**-shape, rel=0.05)


def test_a_pareto_by_hand():
    # Least 1, tail 2, cut at 4: 1 + the integral of x ** -2 from 1 to 4.
    assert fleet_lengths._mean(2.0, 4, 1.0) == pytest.approx(1.75)
    assert fleet_lengths._least(2.0, 4, 1.75) == pytest.approx(1.0)


def test_lengths_of_a_file_are_its_numbers(tmp_path):
    (tmp_path / "lengths").write_text("512\n\n8k\n100\n")
    found = draw(str(tmp_path / "lengths"))
    assert set(found) == {512, 8192, 100}


# ---------------------------------------------------------------- rates


def test_a_document_is_counted_as_a_plan_counts_it(made):
    reader = fleet_rates.reader(made)
    usual = reader.document(reader.usual)
    update = made.update
    assert update.copies == 1  # a shared prefix is written once
    packed = made.reading.groups * usual.packed
    assert packed == update.tokens * update.optimizer_steps
    assert len(usual.shared) == made.reading.chunks + len(made.reading.answers)
    assert usual.turns == made.reading.members * len(usual.shared)


def test_a_last_chunk_is_as_long_as_it_is(made):
    reader = fleet_rates.reader(made)
    two, more = reader.document(512), reader.document(513)
    assert len(more.shared) == len(two.shared) + 1 == reader.turns(513)
    assert more.length == two.length + made.reading.update.shared - 255
    assert more.packed > two.packed and reader.document(1).packed > 0


def test_learning_takes_the_seconds_of_a_plan(made, monkeypatch):
    """Where nothing is lost to efficiency."""
    monkeypatch.setattr(fleet_rates, "COMPUTE", 1.0)
    monkeypatch.setattr(fleet_rates, "HBM", 1.0)
    reader = fleet_rates.reader(made)
    usual = reader.document(reader.usual)
    found = fleet_rates.rates(made, CHIP, usual)
    wanted = [program for program in made.programs if program.launches]
    facts = arithmetic.estimated(made, CHIP, wanted)
    update = sum(fact.seconds * fact.launches for fact in facts if fact.phase == lowering.UPDATE)
    learnt = made.reading.groups * usual.packed
    assert learnt / (found.update * made.engines) == pytest.approx(update)
    full = made.rollout.decode_shape
    (decode,) = (fact for fact in facts if fact.name == lowering.name_of(full))
    step = found.decode + found.slot * full.slots
    assert step * made.settings.steps_per_launch == pytest.approx(decode.seconds)
    assert 0 < found.switch < found.adopt < found.publish and found.prefill > 0


def test_half_of_the_peak_is_half_of_the_speed(made, monkeypatch):
    reader = fleet_rates.reader(made)
    usual = reader.document(reader.usual)
    before = fleet_rates.rates(made, CHIP, usual)
    monkeypatch.setattr(fleet_rates, "COMPUTE", fleet_rates.COMPUTE / 2)
    monkeypatch.setattr(fleet_rates, "HBM", fleet_rates.HBM / 2)
    after = fleet_rates.rates(made, CHIP, usual)
    assert after.update == pytest.approx(before.update / 2)
    assert after.prefill == pytest.approx(before.prefill / 2)
    assert after.decode == pytest.approx(2 * before.decode)


# ---------------------------------------------------------------- modes


def test_modes_are_named_once_and_share_the_slice():
    found = list(fleet_modes.modes(8, fleet_modes.splits("all")))
    assert len({mode.name for mode in found}) == len(found) == 26
    assert [mode.engines for mode in found if not mode.apart] == [8] * 6
    assert {mode.engines for mode in found if mode.apart} == {20, 12, 8, 6}
    assert all(mode.lead == 1 for mode in found if mode.apart)
    assert all(mode.slack == 0 for mode in found if mode.adoption == PINNED)
    (only,) = {mode.readers for mode in fleet_modes.modes(1, [(1, 2)])}
    assert only == 1


def test_a_comparison_is_of_the_same_documents(compared):
    first = compared.rows[0]
    assert first.mode.name == "by turns" and first.speed == 1
    packed = {row.outcome.packed for row in compared.rows if not row.mode.slack}
    assert packed == {first.outcome.packed}
    for row in compared.rows:
        chips = first.chips * first.outcome.seconds / (row.chips * row.outcome.seconds)
        assert row.speed == pytest.approx(chips)
        assert max(row.outcome.ages) <= row.mode.lead + row.mode.slack
    assert compared.full >= 1


@pytest.mark.slow
def test_a_comparison_said_twice_is_the_same(compared):
    assert fleet_modes.compare(asked("all", "1k-16k")) == compared


def test_the_table_has_a_row_of_every_mode_and_ends_with_the_verdict(compared):
    lines = plan_table.fleet_text(compared).splitlines()
    for row in compared.rows:
        (line,) = (line for line in lines if line.strip().startswith(f"{row.mode.name}  "))
        assert f"x{row.speed:.2f}" in line
    assert lines[-1] == compared.verdict
    assert max(map(len, lines)) <= 180


def rows(compared, **speeds):
    """Of one mode on the same chips and one apart."""
    found = [row for row in compared.rows if row.mode.name in ("by turns", "1:2 pinned, S=0")]
    return [
        dataclasses.replace(row, speed=speed)
        for row, speed in zip(found, speeds.values(), strict=True)
    ]


def test_the_verdict_says_whether_a_second_slice_pays(compared):
    assert fleet_modes.verdict(rows(compared, together=1.0, apart=0.9)) == (
        "fastest per chip: by turns, x1.00; a second slice does not pay: it would have to beat "
        "that, and the best split is 1:2 pinned, S=0, x0.90"
    )
    assert fleet_modes.verdict(rows(compared, together=1.0, apart=1.2)) == (
        "fastest per chip: 1:2 pinned, S=0, x1.20; a second slice pays: on one alone it is by "
        "turns, x1.00"
    )
    # What scatter could make of it is no reason to buy.
    assert "does not pay" in fleet_modes.verdict(rows(compared, together=1.0, apart=1.01))


def test_the_command_adds_the_table_and_its_values(capsys):
    words = ["plan", "--config", "quickstart", "--tpu", SLICE, "--estimate", "--fleet", "1:2"]
    assert cli.main(words) == 0
    assert "fastest per chip: " in capsys.readouterr().out.splitlines()[-1]
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["fleet"]
    assert len(said["rows"]) == 11 and said["second_slice_pays"] in (True, False)
    assert cli.main([*words[:-2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fleet"] is None


def test_readings_that_are_no_chain_and_documents_without_end_are_refused():
    with pytest.raises(ValueError, match="reading.order is parallel"):
        asked("1:1", None, "--config.reading.order=parallel")
    with pytest.raises(ValueError, match="turns to play"):
        asked("1:1", "100m-200m")


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    pattern = r"^(notepad-jax plan [^\n]* --fleet [^\n]*)\n```\n.*?^```text\n(.*?)^```$"
    ((command, shown),) = re.findall(pattern, page, re.MULTILINE | re.DOTALL)
    arguments, _ = build_parser("plan").parse_known_args(shlex.split(command)[1:])
    config = configuration.load(arguments.config, [])
    parts = fleet_modes.splits(arguments.fleet)
    what = fleet_modes.asked(config, arguments.tpu, parts, arguments.document_lengths)
    assert shown == plan_table.fleet_text(fleet_modes.compare(what)) + "\n"
