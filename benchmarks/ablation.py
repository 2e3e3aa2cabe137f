"""Compares the algorithms: each trains the same starter, at its best rate, from several seeds.

    python -m benchmarks.ablation --out runs/ablation        (or --only dr_grpo,grpo --seeds 0-1)

Every run is config `mix` (four kinds of questions: exact, list, count, order) with one change,
`VARIANTS`, and a process of its own: it trains, then reads held-out documents of the training
length and of eight times that. Each variant is tried at three rates from a seed that counts for
nothing else, `TRIAL`; the seeds of the table are run at the rate whose held-out curve was highest
there. What is finished is not done again, and a run that was stopped goes on where it stood, so
the same command resumes everything; the starter is made first, if the folder has none. Then the
tables; `--page docs/results.md` puts them and the curves into that page (`ablation_page`). What
differs between two runs of one seed is the algorithm and its rate alone: they read the same
documents. Expected: 7 CPU minutes for the starter, about 1.5 a run, 78 runs.
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

from benchmarks import ablation_page
from notepad_jax.eval.summary import Summary
from notepad_jax.programs import evaluate, subjects
from notepad_jax.setup import configuration, process
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.identity import read_json, write_json
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.training import train, validation

LIMIT = 2 * 3600  # seconds of one run: a machine that hangs ends here
RESULT, STARTER = "result.json", "starter"
RATES = (1.0, 2.0, 4.0)  # times config mix's, shared by the updates of a rollout
TRIAL = 9  # the seed from which rates are chosen


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of config `mix`, and the groups of curves that it is drawn among."""

    name: str
    words: tuple[str, ...]
    panels: tuple[str, ...]
    updates: int = 1  # of a rollout


ADVANTAGE, LENGTHS, CLASSIC, LONG = (
    *("Advantages", "Curriculum"),
    *("Recipes of the GRPO family", "Recipes for long inputs, GSPO, ScaleRL"),
)
_CLASSIC = ("memagent", "grpo", "dapo", "dr_grpo")
_LONG = ("gspo", "golongrl", "qwenlong", "scalerl", "logo")
VARIANTS = (
    Variant("dr_grpo", (), (ADVANTAGE, LENGTHS)),
    Variant("grpo", ("grpo.advantage=grpo",), (ADVANTAGE,)),
    Variant("tmn_reweight", ("grpo.advantage=tmn_reweight",), (ADVANTAGE,)),
    Variant("curriculum", ("tasks.curriculum=2@0,4@6,8@12",), (LENGTHS,)),
    # Of configs/recipes, each as it is but for its number of updates.
    *(
        Variant(f"recipe {name}", (f"recipe={name}", "grpo.epochs=1"), (panel,), updates=4)
        for panel, names in ((CLASSIC, _CLASSIC), (LONG, _LONG))
        for name in names
    ),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the plan."""

    variant: Variant
    rate: float  # one of RATES
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


def variants(only: Sequence[str]) -> list[Variant]:
    """Returns those of some names, all without one; ValueError for a name that there is not."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in only:
        if name not in known:
            raise ValueError(f"there is no variant {name!r}; use some of {', '.join(known)}")
    return [known[name] for name in only or known]


def run_of(out: Path, variant: Variant, rate: float, seed: int, steps: int) -> Run:
    """Returns one run; `steps` 0 are the config's own."""
    words = (f"seed={seed}", *_steps(steps), *_updates(variant, rate), *variant.words)
    folder = out / f"{variant.name.replace(' ', '_')}-x{rate:g}-{seed}"
    return Run(variant, rate, seed, folder, words)


def trials(out: Path, chosen: Sequence[Variant], steps: int) -> list[Run]:
    """Returns the runs from which each variant's rate is chosen."""
    return [run_of(out, variant, rate, TRIAL, steps) for variant in chosen for rate in RATES]


def best_rates(tried: Sequence[Run]) -> dict[str, float]:
    """Returns the best rate of each variant all of whose trials are done, by name.

    It is that of the highest mean of the held-out curve over training; of equals, the lowest.
    """
    means: dict[str, dict[float, float]] = {}
    for run in tried:
        if result := run.result():
            means.setdefault(run.variant.name, {})[run.rate] = ablation_page.area(result["curve"])
    return {
        name: max(sorted(own), key=lambda rate: own[rate])
        for name, own in means.items()
        if len(own) == len(RATES)
    }


def plan(
    out: Path, chosen: Sequence[Variant], seeds: Sequence[int], steps: int, rates: dict[str, float]
) -> list[Run]:
    """Returns the runs at the variants' rates, those that have one.

    They come seed by seed, so that a part of them is a comparison already.
    """
    return [
        run_of(out, variant, rates[variant.name], seed, steps)
        for seed in seeds
        for variant in chosen
        if variant.name in rates
    ]


def _updates(variant: Variant, rate: float) -> Iterator[str]:
    """Yields the words for a variant's updates of a rollout, and for what each of them steps."""
    if variant.updates > 1:
        yield f"grpo.minibatches={variant.updates}"
    usual = configuration.load("mix").optimizer
    for key in ("learning_rate", "adam_learning_rate"):
        yield f"optimizer.{key}={getattr(usual, key) * rate / variant.updates:g}"


def _steps(steps: int) -> Iterator[str]:
    """Yields the words for `steps` rollouts (0: as many as the config has)."""
    if steps:
        usual = configuration.load("mix")
        of, share = usual.optimizer, steps / usual.steps
        yield f"steps={steps}"
        yield f"optimizer.decay_from={round(of.decay_from * share)}"
        yield f"optimizer.decay_steps={round(of.decay_steps * share)}"


def config_of(run: Run, policy: str) -> Training:
    """Returns the config of a run. Raises ConfigProblem for a key that there is not."""
    words = (f"policy={policy}", *run.words)
    return configuration.load("mix", [configuration.FLAG + word for word in words])


# ---------------------------------------------------------------- one run


def one(run: Run, starter: Path) -> None:
    """Trains and measures a run, or goes on with it; writes its result."""
    screen = LineScreen(sys.stderr)
    config = config_of(run, str(starter))
    process.prepared(config)
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
        "rate": run.rate,
        "updates": run.variant.updates,
        "seed": run.seed,
        "words": run.words,
        # What a process that was stopped had used is unknown.
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


def child(words: Sequence[str], log: Path, cwd: Path | None = None) -> None:
    """Runs a part of a benchmark as a process, in `cwd`; SystemExit saying where its log is."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        ended = subprocess.run(
            [sys.executable, "-m", *words], stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT,
            cwd=cwd,
        )  # fmt: skip
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
        command = ["benchmarks.ablation", "--one", run.variant.name]
        command += ["--rate", f"{run.rate:g}", "--seeds", str(run.seed)]
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
    parser.add_argument("--only", default="", help="some variants, by comma; else all of them")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: those of the config")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    parser.add_argument("--page", type=Path, help="put table and curves into this page")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = options()
    said = parser.parse_args(argv)
    out = said.out.resolve()
    try:
        seeds = parsed(said.seeds)
        if said.one:
            (variant,) = variants([said.one])
            (seed,) = seeds
            one(run_of(out, variant, said.rate, seed, said.steps), out / STARTER)
            return
        if TRIAL in seeds:
            raise ValueError(f"--seeds has {TRIAL}, from which rates are chosen; take others")
        chosen = variants([name for name in said.only.split(",") if name])
        tried = trials(out, chosen, said.steps)
        for run in tried:
            config_of(run, str(out / STARTER))
        runs = plan(out, chosen, seeds, said.steps, best_rates(tried))
        if said.plan:
            show(tried + runs, chosen, len(seeds))
            return
        make_starter(out)
        words = [f"--out={out}", f"--steps={said.steps}"]
        run_all(tried, words, said.jobs)
        runs = plan(out, chosen, seeds, said.steps, best_rates(tried))
        run_all(runs, words, said.jobs)
    except ValueError as problem:
        parser.error(str(problem))
    results, of_trials = ([run.result() for run in some] for some in (runs, tried))
    if said.json:
        print(json.dumps({"trials": of_trials, "runs": results}, indent=1))
    else:
        print(ablation_page.text(results, of_trials))
    if said.page:
        panels = {}
        for variant in VARIANTS:
            for panel in variant.panels:
                panels.setdefault(panel, []).append(variant.name)
        ablation_page.put(said.page, results, of_trials, panels)


def show(runs: Sequence[Run], chosen: Sequence[Variant], seeds: int) -> None:
    """Prints what is planned, and how many runs have no rate yet."""
    for run in runs:
        print(f"{run.name:28} {'done' if run.result() else '':5} {' '.join(run.words)}")
    if left := seeds * len(chosen) - sum(run.seed != TRIAL for run in runs):
        print(f"and {left} runs at the rates that the trials will say")


if __name__ == "__main__":
    main()
