"""Rows to play with, in the starter's little language: what the other examples read.

Any rows do: a question, the text to read (`document` or `context`), and what is right (`answers`).
"""

from notepad_jax.starter.synthetic import make_tasks

# Small enough for a laptop; a real run takes the config as it is.
SMALL = {
    "rollout": {"documents": 2, "group_size": 4},
    "engine": {"slots": 16, "pages": 96},
    "grpo": {"row_length": 512, "micro_batch_rows": 1},
}


def rows(first: int, count: int) -> list[dict]:
    found = []
    for number in range(first, first + count):
        (task,) = make_tasks(number, tokens=512, questions=1, unanswerable=0.0, two_hop=0.5)
        text = "".join(task.document.pieces())
        found.append({"question": task.question, "document": text, "answers": task.answers})
    return found
