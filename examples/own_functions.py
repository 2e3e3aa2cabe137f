"""A reward, a memory rule and a callback of one's own.

python examples/own_functions.py

From the command line: notepad-jax train --config.tasks.reward=examples/own_functions.py:brief
"""

from rows import SMALL, rows

import notepad_jax as nj


def brief(answer: str, row: dict) -> float:
    """Full marks for the right word alone, half for one among others."""
    right = any(gold in answer.split() for gold in row["answers"])
    return right * (1.0 if len(answer.split()) == 1 else 0.5)


def never_forget(memory: nj.Note, written: nj.Note) -> nj.Note:
    """What was noted stays until something else is noted."""
    return written if len(written.tokens) else memory


def enough(step: int, metrics: dict[str, float]) -> bool:
    print(f"step {step}: reward {metrics['reward']:.2f}")
    return step < 2  # False ends the run


if __name__ == "__main__":
    run = nj.train(
        dataset=rows(0, 20),
        reward=[(0.9, brief), (0.1, "em")],
        memory_update=never_forget,
        callbacks=[enough],
        changes={**SMALL, "steps": 10},
    )
    with nj.Reader.load(run.name, memory_update=never_forget) as reader:
        story = rows(2, 1)[0]
        reading = reader.read(nj.TextDocument(story["document"]), story["question"])
        print(story["question"], reading.answer)
