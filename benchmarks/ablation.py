"""The algorithms of the family side by side: each trains the same starter, from several seeds.

    python -m benchmarks.ablation --out runs/ablation        (or --only dr_grpo,grpo --seeds 0-1)

Every run is config `mix` (four kinds of questions: exact, list, count, order) with one change,
`VARIANTS`, and a process of its own: it trains, then reads held-out documents of the training
length and of eight times that. What is finished is not done again, and a run that was stopped
goes on where it stood, so the same command resumes everything; the starter is made first, if the
folder has none. Then a table; `--page docs/results.md` puts table and curves into that page
(`ablation_page`). What differs between two runs of one seed is the algorithm alone: they read
the same documents. Expected: 7 CPU minutes for the starter, about 3 a run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from benchmarks import ablation_page
from notepad_jax.eval.summary import Summary
from notepad_jax.programs import configuration, evaluate, machine, subjects, train, validation
from notepad_jax.telemetry.identity import read_json, write_json
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.progress import LineScreen

LIMIT = 2 * 3600  # seconds of one run: a machine that hangs ends here
RESULT, STARTER = "result.json", "starter"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of config `mix`, and the groups of curves that it is drawn among."""

    name: str
    words: tuple[str, ...]
    panels: tuple[str, ...]
    updates: int = 1  # of a rollout


ADVANTAGE, UPDATES, LENGTHS = "Advantages", "Four updates a batch", "Curriculum"
VARIANTS = (
    Variant("dr_grpo", (), (ADVANTAGE, UPDATES, LENGTHS)),
    Variant("grpo", ("grpo.advantage=grpo",), (ADVANTAGE,)),
    Variant("tmn_reweight", ("grpo.advantage=tmn_reweight",), (ADVANTAGE,)),
    Variant("dr_grpo x4", (), (UPDATES,), updates=4),
    # One update as long as four: whether it is more than a larger rate.
    Variant(
        "rate x4",
        ("optimizer.learning_rate=8e-3", "optimizer.adam_learning_rate=16e-4"),
        (UPDATES,),
    ),
    Variant("gspo x4", ("grpo.ratio=gspo",), (UPDATES,), updates=4),
    Variant("cispo x4", ("grpo.ratio=cispo",), (UPDATES,), updates=4),
    Variant("curriculum", ("tasks.curriculum=2@0,4@10,8@20",), (LENGTHS,)),
)
# Of configs/recipes, each as it is but for its number of updates; `--only recipes` has them all.
RECIPES = tuple(
    Variant(f"recipe {name}", (f"recipe={name}", "grpo.epochs=1"), (), updates=4)
    for name in (
        *("memagent", "grpo", "dapo", "dr_grpo", "gspo", "golongrl", "qwenlong", "scalerl"),
        "logo",
    )
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the plan."""

    variant: Variant
    seed: int
    folder: Path
    words: tuple[str, ...]  # of the config, without where things lie

    @property
    def name(self) -> str:
        return self.folder.name

    def result(self) -> dict[str, Any] | None:
        """Returns what was found, or None; ValueError where it is of other settings."""
        if not (self.folder / RESULT).is_file():
            return None
        found = read_json(self.folder / RESULT, "remove it, and the run is measured again")
        if tuple(found["words"]) != self.words:
            raise ValueError(
                f"{self.folder} was run with {' '.join(found['words']) or 'no change'}, and is "
                f"now wanted with {' '.join(self.words) or 'none'}; name another folder (--out)"
            )
        return found


def plan(out: Path, seeds: Sequence[int], only: Sequence[str], steps: int) -> list[Run]:
    """Returns the runs, seed by seed, so that a part of them is a comparison already.

    Raises ValueError for a variant that there is not.
    """
    known = {variant.name: variant for variant in (*VARIANTS, *RECIPES)}
    only = [one for name in only for one in (_names(RECIPES) if name == "recipes" else [name])]
    for name in only:
        if name not in known:
            raise ValueError(f"there is no variant {name!r}; use some of {', '.join(known)}")
    return [
        Run(
            variant=known[name],
            seed=seed,
            folder=out / f"{name.replace(' ', '_')}-{seed}",
            words=(f"seed={seed}", *_steps(known[name], steps), *known[name].words),
        )
        for seed in seeds
        for name in only or _names(VARIANTS)
    ]


def _names(variants: Sequence[Variant]) -> list[str]:
    return [variant.name for variant in variants]


def _steps(variant: Variant, steps: int) -> Iterator[str]:
    """Yields the words for `steps` rollouts (0: as many as the config has) of a variant."""
    if variant.updates > 1:
        yield f"grpo.minibatches={variant.updates}"
    if steps:
        usual = configuration.load("mix")
        of, share = usual.optimizer, steps / usual.steps
        yield f"steps={steps}"
        yield f"optimizer.decay_from={round(of.decay_from * share)}"
        yield f"optimizer.decay_steps={round(of.decay_steps * share)}"


def config_of(run: Run, policy: str) -> ConfigDict:
    """Returns the config of a run. Raises ConfigProblem for a key that there is not."""
    words = (f"policy={policy}", *run.words)
    return configuration.load("mix", [configuration.FLAG + word for word in words])


# ---------------------------------------------------------------- one run


def one(run: Run, starter: Path) -> None:
    """Trains and measures a run, or goes on with it; writes its result."""
    screen = LineScreen(sys.stderr)
    config = config_of(run, str(starter))
    machine.prepared(config)
    trained = run.folder / "run"
    resumed = trained.is_dir()
    train.train(config, trained, screen, resume=resumed)
    used = resource.getrusage(resource.RUSAGE_SELF)
    config = config_of(run, str(trained))
    reader = subjects.named(config, screen, config.evaluate.suite)
    found = evaluate.run(config, reader, run.folder / "eval", screen)
    lines = read_metrics(trained)
    scores = [(x["step"], x[validation.SCORE]) for x in lines if validation.SCORE in x]
    result = {
        "variant": run.variant.name,
        "seed": run.seed,
        "words": run.words,
        # Nobody knows what a process that was stopped had used.
        "training_cpu_seconds": None if resumed else used.ru_utime + used.ru_stime,
        "curve": scores,
        "reward": [(x["step"], x["reward"]) for x in lines if "reward" in x],
        "final": _final([*found.by_length, *found.by_task]),
    }
    write_json(run.folder / RESULT, result)


def _final(summaries: Sequence[Summary]) -> dict[str, dict[str, float]]:
    """Scores by length and source ("all" among them)."""
    found: dict[str, dict[str, float]] = {}
    for s in summaries:
        found.setdefault(str(s.length), {})[s.source.rpartition("/")[2]] = s.accuracy.mean
    return found


# ---------------------------------------------------------------- all runs


def child(words: Sequence[str], log: Path) -> None:
    """Runs a part of this benchmark as a process; SystemExit saying where its log is."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        ended = subprocess.run(
            [sys.executable, "-m", *words], stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    if ended.returncode:
        sys.exit(f"{' '.join(words)} ended with {ended.returncode}; {log} says why")


def make_starter(out: Path) -> Path:
    """Makes the starter, if it is not there; one that was stopped goes on."""
    folder = out / STARTER
    if not (folder / "config.json").is_file():
        print(f"the starter, in {folder}: about 5 minutes of one core", file=sys.stderr)
        child(
            ["notepad_jax", "warmup", "--config", "starter_mix", f"--config.folder={folder}",
             f"--config.checkpoints={out / 'starter_steps'}"],
            out / "starter.log",
        )  # fmt: skip
    return folder


def run_all(runs: Sequence[Run], words: Sequence[str], jobs: int) -> None:
    """Does what is not done yet, `jobs` at a time, and says how long the rest will take."""
    waiting = [run for run in runs if run.result() is None]
    began, done, lock = time.monotonic(), 0, threading.Lock()

    def go(run: Run) -> None:
        nonlocal done
        command = ["benchmarks.ablation", "--one", run.variant.name, "--seeds", str(run.seed)]
        child([*command, *words], run.folder.parent / f"{run.name}.log")
        with lock:
            done += 1
            left = (time.monotonic() - began) / done * (len(waiting) - done)
            print(
                f"{run.name}: {100 * _last(run):.1f}%  "
                f"({done} of {len(waiting)}; about {left / 60:.0f} minutes left)",
                file=sys.stderr,
                flush=True,
            )

    print(f"{len(runs)} runs, {len(runs) - len(waiting)} are done", file=sys.stderr, flush=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for ended in concurrent.futures.as_completed([pool.submit(go, run) for run in waiting]):
                ended.result()
        except BaseException:  # a run that failed, or Ctrl-C: what has not begun does not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _last(run: Run) -> float:
    return run.result()["curve"][-1][1]


def parsed(text: str) -> list[int]:
    """Returns the seeds of "0-4" or "0,2,5"; ValueError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"--seeds is {text!r}; write 0-2, or 0,2,5")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", default="0-2", help="such as 0-2 or 0,2,5")
    parser.add_argument(
        "--only", default="", help="variants, by comma, or recipes; else all but those"
    )
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: those of the config")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    parser.add_argument("--page", type=Path, help="put table and curves into this page")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = options()
    said = parser.parse_args(argv)
    out = said.out.resolve()
    try:
        only = [said.one] if said.one else [name for name in said.only.split(",") if name]
        runs = plan(out, parsed(said.seeds), only, said.steps)
        for run in runs:
            config_of(run, str(out / STARTER))
            run.result()
    except ValueError as problem:
        parser.error(str(problem))
    if said.one:
        one(runs[0], out / STARTER)
        return
    if said.plan:
        for run in runs:
            print(f"{run.name:20} {'done' if run.result() else '':5} {' '.join(run.words)}")
        return
    make_starter(out)
    run_all(runs, [f"--out={out}", f"--steps={said.steps}"], said.jobs)
    results = [run.result() for run in runs]
    if said.json:
        print(json.dumps(results, indent=1))
    else:
        print(ablation_page.table(results), ablation_page.table_of_kinds(results), sep="\n\n")
    if said.page:
        panels = {}
        for variant in VARIANTS:
            for panel in variant.panels:
                panels.setdefault(panel, []).append(variant.name)
        ablation_page.put(said.page, results, panels)


if __name__ == "__main__":
    main()
