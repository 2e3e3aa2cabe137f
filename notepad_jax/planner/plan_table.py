"""A plan as text: every section says whether it is compiled, exact or estimated. Above: `plan`'s
command; `--json` prints the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from notepad_jax.planner.advice import ROUNDED, SAME, Advice
from notepad_jax.planner.fleet_modes import FIRST, STEPS, Comparison, PlayedMode
from notepad_jax.planner.fleet_rates import COMPUTE, HBM
from notepad_jax.planner.plan import SlicePlan

GB = 1e9


def text(plan: SlicePlan, changed: Sequence[Advice] = ()) -> str:
    """Returns the whole report, the verdict last; `changed` is what made it fit."""
    parts = (_head, _residents, _programs, _collectives, _times, _documents, _advice)
    lines = [line for part in parts for line in part(plan)]
    words = " ".join(change.words for change in changed)
    return "\n".join([*lines, "", plan.verdict + (f", with {words}" if words else "")])


def _head(plan: SlicePlan) -> Iterator[str]:
    s = plan.step
    yield (
        f"{plan.model}, {plan.parameters / 1e9:.2f} billion parameters, on {plan.slice}: "
        f"{plan.devices} devices, {plan.hosts} host(s)"
    )
    yield (
        f"learns on {plan.trainer} (fsdp x tensor), reads with {plan.engines} engine(s) of "
        f"{plan.engine_tensor} device(s); prompts counted by {plan.prompts_counted_by}"
    )
    yield (
        f"a step at its limits (estimate: nobody ends early): {s['readings']:,} readings of "
        f"{s['turns_of_a_reading']:,} turns of {s['prompt_tokens_of_a_turn']:,} tokens, "
        f"{s['completion_tokens_of_a_reading']:,} written each; {s['rows']:,} rows, "
        f"{s['micro_batches']:,} micro-batches, {s['optimizer_steps']:,} optimizer steps"
    )
    yield (
        f"an update computes {s['computed_tokens']:,} tokens, {s['fill']:.1%} of them real "
        f"({s['packed_tokens']:,}), the rest padding; a shared prefix is written "
        f"{s['prefix_copies']:.2f} times (packed as a run packs, from lengths)"
    )


def _residents(plan: SlicePlan) -> Iterator[str]:
    yield from ("", "what stays on a device, GB (exact: shapes and shardings)")
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.residents))
    yield _row("", [phase.name for phase in plan.phases])
    for name in names:
        held = [phase.residents.get(name, 0) for phase in plan.phases]
        yield _row(name, [f"{size / GB:.2f}" if size else "" for size in held])
    sums = [sum(phase.residents.values()) for phase in plan.phases]
    yield _row("in all", [f"{size / GB:.2f}" for size in sums])
    yield _row("largest program", [phase.largest for phase in plan.phases])
    yield _row("peak with it", [f"{phase.peak / GB:.2f}" for phase in plan.phases])
    yield _row("of HBM", [f"{plan.hbm / GB:.2f}" for _ in plan.phases])


def _row(name: str, cells: list[str]) -> str:
    return (f"  {name:20}" + "".join(f"{cell:>24}" for cell in cells)).rstrip()


def _programs(plan: SlicePlan) -> Iterator[str]:
    how = "compiled; seconds and limit: estimate" if plan.compiled else "estimate, by arithmetic"
    yield from ("", f"programs, a launch on a device ({how})")
    if plan.left_out and not plan.compiled:
        yield "  the largest of each kind"
    elif plan.left_out:
        yield f"  the largest of each kind: {plan.left_out} narrower ones were not compiled"
    yield (
        f"  {'':24}{'arguments':>10}{'beside':>9}{'peak':>9}{'TFLOP':>10}{'moved':>10}"
        f"{'sent':>9}{'ms':>10}  limit     launches a step"
    )
    for fact in plan.programs:
        if fact.failed:
            yield f"  {fact.name:24}not compiled: {fact.failed}"
            continue
        if fact.refused:
            yield f"  {fact.name:24}refused by the compiler: {fact.refused}"
            continue
        launches = f"{fact.launches:,.0f}" if fact.launches else "-"
        yield (
            f"  {fact.name:24}{fact.arguments / GB:10.2f}{fact.beside / GB:9.2f}"
            f"{fact.peak / GB:9.2f}{fact.flops / 1e12:10.2f}{fact.moved / GB:10.2f}"
            f"{sum(fact.sent.values()) / GB:9.2f}{1e3 * fact.seconds:10.2f}  {fact.limit:10}"
            f"{launches}"
        )


def _collectives(plan: SlicePlan) -> Iterator[str]:
    sending = [fact for fact in plan.programs if fact.launches and fact.sent]
    if not sending:
        return
    how = "compiled" if plan.compiled else "estimate"
    yield from ("", f"sent by a device in a launch, GB ({how})")
    for fact in sending:
        told = ", ".join(f"{kind} {size / GB:.3f}" for kind, size in fact.sent.items())
        yield f"  {fact.name:24}{told}"


def _times(plan: SlicePlan) -> Iterator[str]:
    yield from ("", "a step (estimate: peaks and bandwidths as published, every turn at its limit)")
    for phase in plan.phases:
        if phase.limit:
            yield (
                f"  {phase.name:10} at least {phase.seconds:10.1f} s, "
                f"{phase.flops / 1e12:12,.0f} TFLOP a device; most in {phase.limit}"
            )
    yield f"  {'in all':10} at least {plan.seconds:10.1f} s"


def _documents(plan: SlicePlan) -> Iterator[str]:
    if not plan.documents:
        return
    yield from ("", "one document on one engine (estimate: at least, every turn at its limit)")
    yield (
        f"  {'tokens':>10}{'chunks':>8}{'keys, GB':>10}{'kept':>6}{'serial':>12}"
        f"{'one round':>12}{'each more':>12}  turns in a chain"
    )
    for one in plan.documents:
        yield (
            f"  {one.tokens:>10,}{one.chunks:>8,}{one.keys / GB:>10.1f}"
            f"{'yes' if one.kept else 'no':>6}{one.serial:>10,.0f} s{one.parallel:>10,.0f} s"
            f"{one.again:>10,.0f} s  {one.chain:,} instead of {one.chunks:,}"
        )


def _advice(plan: SlicePlan) -> Iterator[str]:
    if not plan.advice:
        return
    yield from ("", "what to change (estimate; plan again to be sure)")
    for change in plan.advice:
        alone = "alone enough" if change.enough else ""
        kept = {SAME: "same result; ", ROUNDED: "rounds; "}.get(change.result, "")
        yield (
            f"  {change.words:48}{change.saves / GB:7.1f} GB less  {alone:14}"
            f"{kept}{change.consequence}"
        )


# ---------------------------------------------------------------- of a fleet


def fleet_text(compared: Comparison) -> str:
    """Returns a comparison of modes (`plan --fleet`), the verdict last."""
    full = f"were every chip busy and every slot taken it would be about x{compared.full:.2f}"
    lines = *_fleet(compared), *map(_mode, compared.rows), full, "", compared.verdict
    return "\n".join(lines)


def _fleet(compared: Comparison) -> Iterator[str]:
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


def _mode(row: PlayedMode) -> str:
    o = row.outcome
    learnt = sum(o.ages.values())
    ages = ", ".join(f"{age}: {count / learnt:.0%}" for age, count in o.ages.items())
    trainer = f"{o.trainer_idle:.0%}" if row.mode.apart else "-"
    return (
        f"  {row.mode.name:24}{row.chips:9.4g}{o.seconds:11.4g}{f'x{row.speed:.2f}':>10}"
        f"{o.readers_idle:14.0%}{trainer:>14}  {ages}"
    )
