"""Rewards, a memory rule and a callback of one's own.

python examples/own_functions.py

From the command line: notepad-jax train --config.tasks.reward=examples/own_functions.py:brief
"""

from rows import SMALL, rows

import notepad_jax as nj


def brief(reading: nj.ReadingRecord) -> float:
    """Full marks for the right word alone, half for one among others."""
    words = reading.answer.split()
    right = any(gold in words for gold in reading.row["answers"])
    return right * (1.0 if len(words) == 1 else 0.5)


def compressed(reading: nj.ReadingRecord) -> float:
    """A penalty for memories that compress little, as Mem-alpha and Memory-R2 have one.

    A right answer is worth half if each memory is as long as the chunk that was read for it.
    """
    right = nj.score(reading.answer, reading.row["answers"])
    kept = [min(1.0, memory.tokens / memory.chunk_tokens) for memory in reading.memories]
    return right * (1 - 0.5 * sum(kept) / max(1, len(kept)))


def recalled(reading: nj.ReadingRecord) -> list[float]:
    """One number a turn: how many of the facts each memory holds, and whether the answer is right.

    Where nobody wrote down what the facts are (`evidence`), the gold answer is the only one.
    """
    golds = reading.row["answers"]
    worth = [
        sum(memory.held) / len(memory.held) if memory.held else nj.score(memory.text, golds)
        for memory in reading.memories
    ]
    return [*worth, nj.score(reading.answer, golds)]


def brisk(reading: nj.ReadingRecord) -> float:
    """A right answer, worth more for each of eight chunks that was not read for it.

    What it takes to teach a policy to leave a document early (`reading.exits`).
    """
    right = nj.score(reading.answer, reading.row["answers"])
    return right * max(0.0, 1 - len(reading.memories) / 8)


async def asked(reading: nj.ReadingRecord) -> float:
    """A judge that takes its time: many are asked at once, for what `await` waits for."""
    return await judge(reading.row["question"], reading.answer)


async def judge(question: str, answer: str) -> float:
    """Stands for a client of a model behind an API."""
    return float(len(answer) < len(question))


@nj.reward(batch=True, at_once=1, seconds=300)
def shortest(readings: list[nj.ReadingRecord]) -> list[float]:
    """All readings of a question side by side, as a model that ranks them is asked."""
    fewest = min(reading.answer_tokens for reading in readings)
    return [fewest / reading.answer_tokens for reading in readings]


def never_forget(memory: nj.Note, written: nj.Note) -> nj.Note:
    """What was noted stays until something else is noted."""
    return written if len(written.tokens) else memory


def enough(step: int, metrics: dict[str, float]) -> bool:
    print(f"step {step}: reward {metrics['reward']:.2f}")
    return step < 2  # False ends the run


if __name__ == "__main__":
    rewards = [brief, compressed, recalled, asked, shortest, "em"]
    run = nj.train(
        dataset=rows(0, 20),
        reward=[(1 / len(rewards), one) for one in rewards],
        memory_update=never_forget,
        callbacks=[enough],
        changes={**SMALL, "steps": 10},
    )
    with nj.Reader.load(run.name, memory_update=never_forget) as reader:
        story = rows(2, 1)[0]
        reading = reader.read(nj.TextDocument(story["document"]), story["question"])
        print(story["question"], reading.answer)
    found = nj.evaluate(run.name, dataset=rows(0, 4), reward=compressed, memory_update=never_forget)
    print(f"right and short: {found.by_length[0].accuracy.mean:.2f}")
