"""The whole loop on one page: read, score, compare, pack, learn, hand over, again.

    python examples/loop.py --steps 24            (reward 0.43 -> 0.94; a few minutes)

GRPO on the starter policy, out of the pieces that `notepad-jax train` is made of, and with the
same numbers: tests/test_loop.py compares them. Read it from `main` on. What `train` adds and this
leaves out: checkpoints and exact resume; groups that wait and are sampled again; validation,
traces, pages; adapters, KL, several optimizer steps a rollout; several devices, engines and hosts.
"""

import argparse
import asyncio
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from notepad_jax.checkpoint.handoff import InProcess
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.data.records import Records, generated
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import advantages, batch, update
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer, schedule
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import TrainState, start
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh
from notepad_jax.parallel.mesh import SERVING
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.rollout import collector
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.text.chunks import Documents
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer, open_tokenizer
from notepad_jax.types import Draw, Group, PolicySnapshot

STARTER = "data/starter"
SEED = 0
DOCUMENTS, QUESTIONS, READINGS = 5, 4, 8  # a step: 20 groups of 8 readings

# A document is read in chunks of 64 tokens; after each the policy rewrites a memory of 8.
DOCUMENT_TOKENS = 512
RULES = Rules(
    max_question=8, chunk_size=64, max_memory=8, max_answer=4, memory_update="overwrite"
)  # all in tokens: together they bound every context, however long the document is

UPDATE = UpdateSettings(temperature=1.3)  # no KL; advantage: `compare`, normaliser: `pack`'s
OPTIMIZER = OptimizerSettings(
    kind="muon",
    learning_rate=4e-3,
    adam_learning_rate=8e-4,
    warmup_steps=0,
    decay="linear",
    decay_from=6,
    decay_steps=24,
)
ROW_TOKENS = 1152  # of a packed row


# ---------------------------------------------------------------- the policy, and who samples it


@dataclasses.dataclass
class Policy:
    """A network and its words."""

    config: PolicyConfig
    params: Any
    tokenizer: Tokenizer
    template: Template  # how chunk, question and memory become a prompt


def open_policy(folder: str) -> Policy:
    """Reads a Hugging Face folder; its weights go to this process's first device."""
    tokenizer = open_tokenizer(folder)
    config, store = huggingface.open_policy(folder)
    config = dataclasses.replace(config, valid_vocab=tokenizer.vocab_size)
    where = parameters.shardings(config, mesh.one(), SERVING)
    params = huggingface.import_params(config, store, where)
    return Policy(config, params, tokenizer, Template.load("question_last", tokenizer))


def make_engine(policy: Policy) -> EngineService:
    """Returns the engine: a paged cache, continuous batching, and no weights yet."""
    sizes = EngineSettings(
        slots=128,
        page_size=64,
        pages=512,
        max_prompt=policy.template.longest_prompt(
            RULES.max_question, RULES.chunk_size, RULES.max_memory, RULES.carry
        ),
        max_new_tokens=max(RULES.max_memory, RULES.max_answer),
        steps_per_launch=8,
        row_tokens=416,
    )
    nobody = PolicySnapshot(-1, None)
    return EngineService(Executor(sizes, Device(policy.config, sizes)), nobody)


# ---------------------------------------------------------------- read and score


def make_reader(policy: Policy, engine: EngineService) -> Reader:
    """Returns who reads: the memory agent over the engine, at the training temperature."""
    template = policy.template
    return Reader(
        completer=engine,
        tokenizer=policy.tokenizer,
        template=template,
        rules=RULES,
        # The seed of a reading takes the place of this one.
        sampling=TurnSampling(UPDATE.temperature, 1.0, template.stop_ids, seed=0),
        chunks_of=Documents(policy.tokenizer, RULES.chunk_size),
    )


def make_stream() -> Records:
    """Returns the endless stream of documents, by ordinal: 30% of the questions have no answer."""
    make = functools.partial(
        make_tasks, tokens=DOCUMENT_TOKENS, questions=QUESTIONS, distractor_share=0.5
    )
    return generated(make, SEED, documents=range(2**30))


async def read(step: int, stream: Records, reader: Reader) -> list[Group]:
    """Reads each question of the step's documents READINGS times; every answer is scored.

    A reading is a coroutine: chunk by chunk it asks the engine for its next memory, and at the end
    for an answer. There is no barrier between turns, and the members of a group share the pages
    of their chunks.
    """
    first = (step - 1) * DOCUMENTS
    draws = [Draw(n, stream.at(n)) for n in range(first, first + DOCUMENTS)]
    groups, failed = await collector.collect(draws, reader, READINGS, SEED)
    if failed:
        raise failed[0].failure
    return groups


# ---------------------------------------------------------------- compare, pack and learn


def compare(groups: list[Group]) -> tuple[list[Group], list[list[np.ndarray]]]:
    """Returns the groups that teach something, with an advantage for each turn of each reading.

    A reading's advantage is its reward minus its group's mean, and all its turns inherit it:
    whoever wrote down what led to the right answer is made likelier. Where all readings are
    worth the same there is nothing to compare.
    """
    groups = [group for group in groups if group.informative]
    return groups, [
        advantages.of_turns(group, values)
        for group, values in zip(groups, advantages.dr_grpo(groups), strict=True)
    ]


def learn(
    policy: Policy, optimizer: Any, state: TrainState, groups: list[Group], rate: float
) -> tuple[TrainState, dict[str, float]]:
    """Takes one optimizer step on all turns of the groups; returns the new state and metrics.

    In a packed row a chunk stands once, followed by the turns of all who read it; a mask keeps
    them apart, so loss and gradient are those of one row a turn.
    """
    groups, values = compare(groups)
    if not groups:
        return state, {}
    packed = batch.pack(groups, values, ROW_TOKENS, length_multiple=ROW_TOKENS)
    # {}: nothing is frozen; moved: the policy is still the one that sampled.
    state, metrics = update.learn(
        policy.config, optimizer, UPDATE, state, {}, [packed.batch], rate, moved=False
    )
    return state, {**metrics, "packed_tokens": packed.stats.packed_tokens}


# ---------------------------------------------------------------- the loop


async def main(steps: int = 24, tell: Callable[[int, dict[str, float]], None] | None = None) -> Any:
    """Trains for `steps` steps; returns the trained weights."""
    policy, stream = open_policy(STARTER), make_stream()
    optimizer, rate = make_optimizer(OPTIMIZER), schedule(OPTIMIZER)
    engine = make_engine(policy)
    handoff = InProcess(policy.params)
    reader = make_reader(policy, engine)
    handoff.publish(PolicySnapshot(0, policy.params))
    engine.start_with(handoff.adopt())
    state = start(policy.params, optimizer)  # float32 masters, and moments
    async with engine:
        for step in range(1, steps + 1):
            groups = await read(step, stream, reader)
            state, metrics = learn(policy, optimizer, state, groups, float(rate(step - 1)))
            handoff.publish(PolicySnapshot(step, state.masters))
            await engine.adopt(handoff.adopt())
            rewards = [one.reward for group in groups for one in group.trajectories]
            (tell or show)(step, {"reward": float(np.mean(rewards)), **metrics})
    return state.masters


def show(step: int, metrics: dict[str, float]) -> None:
    loss = metrics.get("loss", float("nan"))
    print(f"step {step:3}   reward {metrics['reward']:.3f}   loss {loss:+.4f}", flush=True)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description="Trains the starter policy by GRPO.")
    asked.add_argument("--steps", type=int, default=24, help="default %(default)s")
    steps = asked.parse_args().steps
    if not Path(STARTER).is_dir():
        sys.exit(f"{STARTER} is not here: run this in the project's folder")
    asyncio.run(main(steps))
