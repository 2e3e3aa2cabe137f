"""Command-line options that several commands have."""

from __future__ import annotations

from notepad_jax.commands.parser import Once, Parser
from notepad_jax.setup import configuration

POLICY = (
    "runs/NAME, runs/NAME@STEP or @best, a Hugging Face folder, or one of adapters (the config's)"
)


def run_options(parser: Parser) -> None:
    parser.add_argument("--name", help="name of the run; its folder is runs/NAME")
    parser.add_argument("--resume", action="store_true", help="go on where the run stopped")


def recipe_option(parser: Parser) -> None:
    parser.add_argument("--recipe", metavar="NAME", action=Once, help="how it learns: "
                     f"{', '.join(configuration.recipes())}; or a file with apply(config). "
                     "Overrides win over it (docs/algorithms.md)")  # fmt: skip


def training_options(parser: Parser) -> None:
    run_options(parser)
    recipe_option(parser)
    parser.add_argument("--step", type=int, help="with --resume: from this checkpoint (the "
                     "newest good one); later ones are given up")  # fmt: skip


def suite_options(parser: Parser) -> None:
    parser.add_argument("--tasks", help="some of the suite's tasks: vt,cwe (all)")
    parser.add_argument("--lengths", help="tokens, as 2k,32k,3.5m (the usual; of a file, all)")
    parser.add_argument("--samples", type=int, help="questions per task and length (the usual "
                     "128; of a file, all)")  # fmt: skip
    parser.add_argument("--text", help="haystack: stdlib, noise, a text file or folder")
    parser.add_argument("--hotpotqa", metavar="FILE", help="HotpotQA's json, here or in gs://")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD's json, here or in gs://")


def reader_options(parser: Parser) -> None:
    parser.add_argument("--policy", help=POLICY)
    parser.add_argument("--endpoint", metavar="URL", help="read through this server instead")
    parser.add_argument("--model", help="at the endpoint; may be left out if it has one")
    parser.add_argument("--tokenizer", help="a folder with a tokenizer that counts tokens")


def overwrite_option(parser: Parser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace the policy there")
