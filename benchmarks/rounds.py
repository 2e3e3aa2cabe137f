"""Reading in rounds against reading serially: what GRPO teaches of each, and what each costs.

    python -m benchmarks.rounds --out runs/rounds [--page docs/evaluation.md] [--seeds 0-2]

The starter of config `starter_rounds` is made first, if the folder has none. Then each of ORDERS is
trained with config `rounds` and the keys of its own, from every seed, and reads held-out documents
of each length greedily in its own order. A run is a process; what is finished is not done again,
one that was stopped goes on, and a length that is there is not read again, so the same command
resumes everything. Prints the tables; `--page` writes them between the page's marks. Beside
accuracy: the turns that follow one another (what no number of chips shortens) and the tokens
decoded, of the first ARCHIVED readings; wall and CPU seconds of all questions of a length, with
what is compiled. Expected: 7 minutes of one core for the starter, 5 a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.ablation import child, parsed
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.readings import READINGS
from notepad_jax.eval.summary import Share
from notepad_jax.programs import evaluate, subjects
from notepad_jax.reading.trace import Trace, TurnRecord
from notepad_jax.report import numerals
from notepad_jax.setup import configuration, process
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.identity import read_json, write_json
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.training import train

MARK, STARTER = "rounds", "starter"
ARCHIVED = 16  # readings of a length whose turns are kept, to count
LENGTHS = ("2k", "8k", "32k", "128k", "512k")
ORDERS = {
    "serial": (
        *("reading.order=serial", "reading.passes=1"),
        *("data.chapter_rate=0.03125", "rollout.temperature=1.3"),  # the quick start's
    ),
    "parallel": ("reading.order=parallel", "reading.passes=2"),
    "mixed": ("reading.order=mixed", "reading.passes=2"),
}
UNTRAINED = "untrained"  # in the place of a seed: the starter as it is


def main(argv: Sequence[str] | None = None) -> None:
    said = options().parse_args(argv)
    out, orders = said.out.resolve(), [name for name in ORDERS if name in said.orders.split(",")]
    if said.one:
        one(out, orders[0], said.one, said.lengths.split(","), said.steps, said.questions)
        return
    if not said.tables:
        make_starter(out, said.warmup_steps)
        for who in (UNTRAINED, *map(str, parsed(said.seeds))):
            for order in orders:
                words = [f"--out={out}", f"--orders={order}", f"--one={who}"]
                words += [f"--{key}={getattr(said, key)}" for key in ("lengths", "steps")]
                words += [f"--questions={said.questions}"]
                child(["benchmarks.rounds", *words], out / f"{order}-{who}.log")
                print(f"{order}, {who}: done", file=sys.stderr, flush=True)
    text = page(found(out))
    print(text)
    if said.page:
        marks.put(said.page, MARK, text)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"))
    parser.add_argument("--seeds", default="0-2", help="such as 0-2 or 0,2,5")
    parser.add_argument("--orders", default=",".join(ORDERS), help="some of them (all)")
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="some lengths (all)")
    parser.add_argument("--questions", type=int, default=0, help="of a length; 0: the config's")
    parser.add_argument("--steps", type=int, default=0, help="of GRPO; 0: those of the config")
    parser.add_argument("--warmup-steps", type=int, default=0, help="of the starter; the same")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--tables", action="store_true", help="run nothing; what is there")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def make_starter(out: Path, steps: int) -> None:
    """Makes the starter, if it is not there; one that was stopped goes on."""
    folder = out / STARTER
    if (folder / "config.json").is_file():
        return
    keys = {"folder": folder, "checkpoints": out / "starter_steps"}
    keys |= {"steps": steps, "drill_steps": 0} if steps else {}
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    child(["notepad_jax", "warmup", "--config", "starter_rounds", *words], out / "starter.log")


# ---------------------------------------------------------------- one run


def config_of(order: str, policy: Path, *words: str) -> Training:
    """Returns config `rounds` in one of ORDERS."""
    said = (f"policy={policy}", *ORDERS[order], f"evaluate.archive_turns={ARCHIVED}", *words)
    return configuration.load("rounds", [configuration.FLAG + word for word in said])


def one(
    out: Path, order: str, who: str, lengths: Sequence[str], steps: int, questions: int
) -> None:
    """Trains one order from one seed, if need be, and reads the lengths that were not read yet."""
    screen, folder, policy = LineScreen(sys.stderr), out / f"{order}-{who}", out / STARTER
    words = [f"steps={steps}"] if steps else []
    if who != UNTRAINED:
        config = config_of(order, policy, f"seed={who}", *words)
        process.prepared(config)
        policy = folder / "run"
        train.train(config, policy, screen, resume=policy.is_dir())
    for length in lengths:
        if not (folder / f"{length}.json").is_file():
            read(out, order, who, policy, length, questions)


def read(out: Path, order: str, who: str, policy: Path, length: str, questions: int) -> None:
    """Reads one length and writes what was found."""
    words = [f"evaluate.lengths={length}"]
    many = ("questions", "questions_longest")  # the second, of 1M tokens and more
    words += [f"evaluate.{name}={questions}" for name in many] if questions else []
    config = config_of(order, policy, *words)
    process.prepared(config)
    screen, folder = LineScreen(sys.stderr), out / f"{order}-{who}"
    wall, cpu = time.monotonic(), time.process_time()
    reader = subjects.named(config, screen, config.evaluate.suite)
    outcome = evaluate.run(config, reader, folder / f"eval-{length}", screen)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    (total,) = outcome.by_length
    kinds = {s.source.rpartition("/")[2]: s.accuracy.mean for s in outcome.by_task}
    write_json(
        folder / f"{length}.json",
        {
            "order": order, "who": who, "length": parse_length(length),
            "questions": total.questions, "accuracy": vars(total.accuracy), "kinds": kinds,
            "captured": total.captured and total.captured.mean,
            "retained": total.retained and total.retained.mean,
            "wall": wall, "cpu": cpu, **counted(folder / f"eval-{length}" / READINGS, order),
        },
    )  # fmt: skip


def counted(path: Path, order: str) -> dict[str, float]:
    """Returns of the readings whose turns were kept: the mean chain, turns, and tokens decoded."""
    with Trace(path) as trace:
        kept = [trace.whole(number).turns for number in range(len(trace))]
    kept = [turns for turns in kept if turns]
    return {
        "chain": sum(chain(turns, order) for turns in kept) / len(kept),
        "turns": sum(map(len, kept)) / len(kept),
        "decoded": sum(len(turn.tokens) for turns in kept for turn in turns) / len(kept),
    }


def chain(turns: Sequence[TurnRecord], order: str) -> int:
    """Returns how many turns of a reading have to wait for one another.

    In a parallel reading those of one level of one round do not; in a mixed one, the chunks' own.
    """
    abreast = {"serial": lambda t: False, "parallel": lambda t: True}
    beside = abreast.get(order, lambda t: t.level == 0 and t.kind == "update")
    return len({(t.kind, t.round, t.level, 0 if beside(t) else t.chunk) for t in turns})


# ---------------------------------------------------------------- what was found


def found(out: Path) -> list[dict[str, Any]]:
    """Returns what was found, in the order of tables."""
    paths = [path for order in ORDERS for path in out.glob(f"{order}-*/*.json")]
    mend = "remove it, and it is measured again"
    points = [read_json(path, mend) for path in paths]
    known = list(ORDERS)
    return sorted(points, key=lambda p: (known.index(p["order"]), p["who"], p["length"]))


def page(points: Sequence[dict[str, Any]]) -> str:
    """Returns the tables as markdown: accuracy from each seed, and what a reading costs."""
    lengths = sorted({point["length"] for point in points})
    return "\n\n".join([accuracies(points, lengths), costs(points)])


def accuracies(points: Sequence[dict[str, Any]], lengths: Sequence[int]) -> str:
    rows: dict[str, dict[int, str]] = {}
    for p in points:
        who = p["who"] if p["who"] == UNTRAINED else f"seed {p['who']}"
        share = Share(**p["accuracy"])
        said = f"{numerals.percent(share.mean)} ({numerals.interval(share)}), n {p['questions']}"
        rows.setdefault(f"{p['order']}, {who}", {})[p["length"]] = said
    return _table(["", *map(format_length, lengths)], [
        [name, *(row.get(length, "-") for length in lengths)] for name, row in rows.items()
    ])  # fmt: skip


def costs(points: Sequence[dict[str, Any]]) -> str:
    """One row an order and length, means over the seeds; seconds are of all questions."""
    head = ["", "tokens", "turns in a chain", "turns", "tokens decoded", "wall s", "CPU s"]
    rows = []
    for key in dict.fromkeys((p["order"], p["length"]) for p in points if p["who"] != UNTRAINED):
        own = [p for p in points if (p["order"], p["length"]) == key and p["who"] != UNTRAINED]
        mean = {
            name: sum(p[name] for p in own) / len(own)
            for name in ("chain", "turns", "decoded", "wall", "cpu")
        }
        told = [f"{mean[name]:,.0f}" for name in ("turns", "decoded", "wall", "cpu")]
        rows.append([key[0], format_length(key[1]), f"{mean['chain']:,.1f}", *told])
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
