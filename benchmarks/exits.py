"""What leaving early costs a policy that was never taught to: the calibration of `exit_after`.

    python -m benchmarks.exits --policy POLICY --exit-after 1,2,4,8 [--page docs/evaluation.md]
        [-- --suite stories --lengths 2k,8k --config.KEY=VALUE ...]

Reads the same held-out questions by `notepad-jax eval`, to the end and with each
`reading.exit_after`, into ./runs/NAME-N; the same command goes on after a kill. What stands behind
`--` is for eval. Says, by length, how much of the document was read, and of the answers that were
right to the end, which share was lost, with its 95% interval: choose the smallest number whose
interval you can live with.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import marks
from notepad_jax.eval import summary
from notepad_jax.eval.lengths import format_length
from notepad_jax.eval.measure import Result
from notepad_jax.eval.readings import results_in
from notepad_jax.eval.summary import Share
from notepad_jax.report import numerals

RUNS, MARK = Path("runs"), "exits"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What leaving after `after` turns that changed nothing did at one length."""

    length: int  # tokens
    after: int  # turns; 0: read to the end
    right: Share
    lost: Share  # of the questions that were right to the end
    won: int  # questions that were wrong to the end, and right now
    read: float  # share of the document's tokens


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="what eval takes as --policy")
    parser.add_argument("--exit-after", default="1,2,4,8", help="turns, as '2,4' (1,2,4,8)")
    parser.add_argument("--name", default="exits", help="of the runs, runs/NAME-N (exits)")
    parser.add_argument("--page", type=Path, help="a page with a place for the table")
    parser.add_argument("eval", nargs="*", metavar="-- OPTION", help="for notepad-jax eval")
    said = parser.parse_args(argv)
    numbers = [0, *map(int, said.exit_after.split(","))]
    for after in numbers:
        _read(said, after)
    found = {after: results_in(RUNS / f"{said.name}-{after}") for after in numbers}
    text = table([cost for after in numbers for cost in costs(after, found[0], found[after])])
    print(text)
    if said.page is not None:
        marks.put(said.page, MARK, text)


def _read(said: argparse.Namespace, after: int) -> None:
    name = f"{said.name}-{after}"
    going_on = ["--resume"] if (RUNS / name).exists() else []
    command = [sys.executable, "-m", "notepad_jax", "eval", "--name", name, *going_on]
    if not going_on:
        command += ["--policy", said.policy, *said.eval, f"--config.reading.exit_after={after}"]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"{name} ended with {code}; the same command goes on")


def costs(after: int, whole: Sequence[Result], early: Sequence[Result]) -> list[Cost]:
    """Returns what leaving did, by length, to the same questions. KeyError for other questions."""
    ended = {one.key: one for one in whole}
    return [
        _cost(after, length, [(ended[one.key], one) for one in early if one.length == length])
        for length in sorted({one.length for one in early})
    ]


def _cost(after: int, length: int, pairs: Sequence[tuple[Result, Result]]) -> Cost:
    right = [(old, new) for old, new in pairs if old.correct == 1]
    return Cost(
        length=length,
        after=after,
        right=_share([new.correct for _, new in pairs], [new for _, new in pairs]),
        lost=_share([float(new.correct < 1) for _, new in right], [new for _, new in right]),
        won=sum(old.correct < 1 == new.correct for old, new in pairs),
        read=sum(new.tokens for _, new in pairs) / max(1, sum(old.tokens for old, _ in pairs)),
    )


def _share(values: Sequence[float], of: Sequence[Result]) -> Share:
    return summary.share(values, [one.document or one.task_id for one in of])


def table(found: Sequence[Cost]) -> str:
    """Returns markdown, a line a length and number."""
    lines = [
        "| | `exit_after` | document read | right | lost of what was right | won |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda cost: (cost.length, cost.after == 0, cost.after)):
        lost = _told(one.lost) if one.after else "-"
        won = f"{one.won}" if one.after else "-"
        lines.append(
            f"| {format_length(one.length)} | {one.after or 'to the end'} | "
            f"{numerals.percent(one.read)} | {_told(one.right)} | {lost} | {won} |"
        )
    return "\n".join(lines)


def _told(share: Share) -> str:
    return f"{numerals.percent(share.mean)} ({numerals.interval(share)})"


if __name__ == "__main__":
    main()
