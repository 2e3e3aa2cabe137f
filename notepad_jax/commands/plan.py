"""`notepad-jax plan`: whether a config fits a TPU slice, and its fastest settings there."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import recipe_option
from notepad_jax.commands.parser import Parser, PrintedFailure, show
from notepad_jax.planner import (
    cost_analysis,
    fastest,
    figures,
    fleet_modes,
    plan,
    plan_table,
)
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen
from pallas_kernels import aot

CONFIG = "qwen2_5_7b"
TRIES = 4  # settings that --fastest compiles at most
LONG = """\
Compiles every program of a training run with the TPU compiler (no TPU is needed) and
says what it needs of each chip's memory, what the chips send each other, how long a
step would take at least, and what to change where it does not fit: exit code 1 then.
`policy` may be a published model whose weights are not here.

--fastest looks for the row length, rows at once, recomputation, devices to a row,
devices to an engine and, where --tpu names several, the slice with which a step takes
the fewest seconds, and the fewest dollars; its numbers stay what they are. Hundreds of
settings are counted by arithmetic, the best compiled. Without libtpu, or with
--estimate, arithmetic is all. With --json it prints a line for each when it is known.

--fleet plays steps in which reading and learning overlap, on these chips and on readers
and a trainer apart (R:T, chips of the ones to chips of the other), for documents of
--lengths, and says which is fastest per chip and whether a second slice pays.

examples: notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4
          notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4 --fastest
          notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p,v6e --fastest \\
              --estimate --price v5p=2.94
          notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4 --estimate \\
              --fleet all --lengths 2K-128K"""


def options(parser: Parser) -> None:
    recipe_option(parser)
    parser.add_argument(
        "--tpu", required=True, metavar="CHIP:SIDES", help="a slice, as v5p:2x4x4 or v6e:8x8; "
        "with --fastest several, by comma, or a chip: all of its slices up to "
        f"{fastest.MOST_CHIPS} chips",
    )  # fmt: skip
    parser.add_argument(
        "--fit", action="store_true", help="change the config until it fits, and say how"
    )
    parser.add_argument(
        "--largest", action="store_true",
        help="compile only the largest program of each kind, what full turns launch: half the time",
    )  # fmt: skip
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="compile nothing: arithmetic alone, in a second and without libtpu",
    )
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="search for the settings that make a step fastest and cheapest",
    )
    parser.add_argument(
        "--tries",
        type=int,
        help="with --fastest: how many of the best are compiled "
        f"at most ({TRIES}), each a few minutes of two cores",
    )
    listed = ", ".join(f"{chip} {price:.2f}" for chip, price in fastest.PRICES.items())
    parser.add_argument("--price", action="append", default=[], metavar="CHIP=DOLLARS",
                     help=f"of a chip for an hour, also several times ({listed})")  # fmt: skip
    parser.add_argument("--fleet", metavar="R:T", help="compare also readers and a trainer "
                        f"apart, as 1:2, or {fleet_modes.ALL}: several splits")  # fmt: skip
    parser.add_argument(
        "--lengths",
        dest="document_lengths",  # `lengths` stands for a key of evaluations (cli.SHORTHAND)
        metavar="FORM",
        help="with --fleet: of documents, as 2K-128K (log-uniform), pareto:1.3:1M (tail, longest; "
        "the mean is the config's) or a file, a number of tokens a line (all at the config's)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="append what is compiled and found to FILE as "
        "it comes, as lines of JSON; what it holds is not compiled again",
    )


def run(
    arguments: argparse.Namespace, config: Training, folder: None, screen: Screen
) -> tuple[Any, str]:
    if not arguments.fastest and (arguments.price or arguments.tries is not None):
        raise ValueError("--price and --tries are of --fastest; say that, too, or leave them out")
    if arguments.estimate and arguments.largest:
        raise ValueError("--estimate compiles nothing, and --largest the largest: leave one out")
    fleet = _fleet(arguments, config)  # before anything is compiled
    known = cost_analysis.CostCache(Path(arguments.out)) if arguments.out else {}
    if arguments.fastest:
        return _fastest(arguments, config, screen, known)
    changed: list[Any] = []
    programs = plan.LARGEST if arguments.largest else plan.ALL
    programs = plan.ESTIMATE if arguments.estimate else programs
    try:
        if arguments.fit:
            made, changed = plan.fit(config, arguments.tpu, screen, programs, known)
        else:
            made = plan.run(config, arguments.tpu, screen, known, programs)
    except plan.DoesNotFit as problem:
        raise PrintedFailure(problem.plan, plan_table.text(problem.plan), str(problem)) from problem
    result = dataclasses.asdict(made) | {"changed": changed, "fleet": None}
    text = plan_table.text(made, changed)
    if fleet is None:
        return result, text
    config = configuration.changed(config, [word for one in changed for word in one.overrides])
    compared = fleet_modes.compare(_fleet(arguments, config))
    return result | {"fleet": compared.told}, f"{text}\n\n{plan_table.fleet_text(compared)}"


def _fleet(arguments: argparse.Namespace, config: Training) -> fleet_modes.Unplayed | None:
    """What --fleet asks for. Raises ValueError for what cannot be compared."""
    if arguments.fleet is None:
        if arguments.document_lengths is not None:
            raise ValueError("--lengths are those of --fleet; say that, too, or leave them out")
        return None
    if arguments.fastest:
        raise ValueError("--fleet is of one setting, and --fastest of many: leave one out")
    parts = fleet_modes.splits(arguments.fleet)
    return fleet_modes.asked(config, arguments.tpu, parts, arguments.document_lengths)


def _fastest(
    arguments: argparse.Namespace, config: Training, screen: Screen, known: dict[str, Any]
) -> tuple[Any, str]:
    """Tells every point when it is there, as JSON or on the screen; Ctrl-C keeps the table."""
    points: list[figures.Point] = []

    def told(point: figures.Point) -> None:
        if not points and not arguments.json:
            screen.say(figures.HEAD)
        points.append(point)
        line = {"point": dataclasses.asdict(point)}
        if isinstance(known, cost_analysis.CostCache):
            known.add(line)
        if arguments.json:
            show(json.dumps(line))
        else:
            screen.say(figures.line(point))

    tries = TRIES if arguments.tries is None else arguments.tries
    if arguments.fit:
        raise ValueError("--fastest finds what fits by itself: leave out --fit")
    if arguments.largest:
        raise ValueError("--largest is of one setting, and --fastest of many: leave one out")
    if tries < 0:
        raise ValueError(f"--tries is {tries}; use 0 (nothing is compiled) or more")
    if arguments.estimate or aot.missing_compiler():
        tries = 0
    names = fastest.slices(arguments.tpu)
    asked = fastest.Search(config, names, fastest.prices(arguments.price), tries)
    try:
        fastest.search(asked, screen, told, known)
    except KeyboardInterrupt:
        if points and not arguments.json:
            show(figures.text(points))
        raise
    fast, cheap = figures.winners(points)
    if arguments.json:
        show(json.dumps({"fastest": dataclasses.asdict(fast)}))
        cheapest = None if cheap is None else dataclasses.asdict(cheap)
        show(json.dumps({"cheapest": cheapest}))
    return None, figures.text(points)
