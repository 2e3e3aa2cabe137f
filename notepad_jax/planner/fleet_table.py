"""A comparison of modes as text, for `plan --fleet`; `--json` prints the same values."""

from __future__ import annotations

from collections.abc import Iterator

from notepad_jax.planner.fleet_modes import FIRST, STEPS, Comparison, PlayedMode
from notepad_jax.planner.fleet_rates import COMPUTE, HBM


def text(compared: Comparison) -> str:
    """Returns the whole table, the verdict last."""
    return "\n".join([*_head(compared), *map(_line, compared.rows), *_foot(compared)])


def _head(compared: Comparison) -> Iterator[str]:
    r = compared.rates
    yield (
        f"reading and learning at once (simulated): steps {FIRST} to {STEPS} of "
        f"{compared.batch:,} documents, {compared.lengths}, {compared.turns:.1f} turns on average"
    )
    yield (
        f"  an engine's {compared.engine_chips:g} device(s) (estimate: {COMPUTE:.0%} of peak "
        f"and {HBM:.0%} of HBM): prefill {r.prefill:,.0f} tokens/s, update {r.update:,.0f} packed "
        "tokens/s,"
    )
    yield (
        f"  a decoding step {1e3 * r.decode:.3g} ms and {1e6 * r.slot:.3g} us for each of "
        f"{r.slots} slots"
    )
    yield (
        f"  weights (assumed): handed off on the same chips in {r.handoff:.2g} s; apart published "
        f"in {r.publish:.2g} s, adopted in {r.adopt:.2g} s (draining) or {r.switch:.2g} s (pinned)"
    )
    yield (
        f"  {'':24}{'devices':>9}{'s a step':>11}{'per chip':>10}{'readers idle':>14}"
        f"{'trainer idle':>14}  versions behind"
    )


def _line(row: PlayedMode) -> str:
    o = row.outcome
    learnt = sum(o.ages.values())
    ages = ", ".join(f"{age}: {count / learnt:.0%}" for age, count in o.ages.items())
    trainer = f"{o.trainer_idle:.0%}" if row.mode.apart else "-"
    return (
        f"  {row.mode.name:24}{row.chips:9.4g}{o.seconds:11.4g}{f'x{row.speed:.2f}':>10}"
        f"{o.readers_idle:14.0%}{trainer:>14}  {ages}"
    )


def _foot(compared: Comparison) -> Iterator[str]:
    yield f"were every chip busy and every slot taken it would be about x{compared.full:.2f}"
    yield ""
    yield compared.verdict
