"""Traces made by hand, for the tests of their pages: a group in training, and an evaluation."""

import dataclasses
from pathlib import Path

from notepad_jax.reading.trace import Kept, MemoryChange, Spool, TraceFile, TurnRecord

HOSTILE = (
    "</script><script>document.title = 'broken'</script>"
    "<img src=x onerror=\"document.title = 'broken'\">"
    "\x1b]0;owned\x07\x1b[2J <|im_end|> \u2028\u2029\u202e data: [DONE]\n\n\0 \ud800 {{ 7 * 7 }}"
)
PIECES = {
    1: "Rex",
    2: " is",
    3: " king",
    4: "<|im_end|>",
    5: " who?",
    300: "<|im_start|>",
    6: HOSTILE,
}


def turn(chunk: int, kind: str = "update", version: int = 3, shared_of: int | None = None, said=2):
    tokens = [1, said, 3, 4]
    shared = () if shared_of is not None else (300, 5, chunk)
    logprobs = [-0.1, -2.5, -0.0, -1.0]
    theirs = [-0.1, -2.4, -0.0, -1.0] if chunk == 1 else []
    return TurnRecord(
        chunk, kind, version, "stop", shared, shared_of, (5, 6), tokens, logprobs, theirs
    )


def training(path: Path, turns: int = 4, groups: int = 1) -> Path:
    """Groups of two: sample 1 parts from sample 0 at the third chunk, and loses the evidence."""
    with TraceFile(path) as file:
        for step in range(1, groups + 1):
            first = len(file)
            for sample in range(2):
                changes = [MemoryChange(0, "Rex is king .", 4), MemoryChange(2, "Rex sleeps", 2)]
                if not sample:
                    changes[1] = MemoryChange(2, "Rex is king , says Ada", 6)
                shared_of = first if sample else None
                kept = [turn(k, shared_of=shared_of) for k in range(turns - 1)]
                kept.append(turn(turns - 1, "answer", shared_of=shared_of))
                reading = {
                    "step": step, "ordinal": 7, "task_id": "t", "source": "made/one",
                    "sample": sample, "question": "who is king ?", "gold": ["Rex"],
                    "evidence": ["king"], "answer": "Ada" if sample else "Rex",
                    "status": "answered", "reward": 1.0 - sample,
                    "reward_parts": {"em": 1.0 - sample}, "turns": turns,
                    "policy_versions": [3], "staleness": step - 1, "advantage": 0.5 - sample,
                }  # fmt: skip
                file.add(reading, Spool(changes), Kept(Spool(kept), PIECES))
    return path


def evaluation(path: Path, turns: int = 3, changes=None, **changed) -> Path:
    """One reading, of which no turn was kept."""
    reading = {
        "task_id": "e", "source": "made/two", "method": "notepad", "length": 2048, "repeat": 0,
        "question": "which ?", "gold": ["red"], "answer": "red", "correct": 1.0, "finish": "stop",
        "failed": False, "turns": turns, "tokens": 2000, "recall": None, "lost": "", "evidence": [],
        "problem": "", "scores": {"em": 1.0},
    }  # fmt: skip
    some = [MemoryChange(0, "red", 1, 0.5)] if changes is None else changes
    with TraceFile(path) as file:
        file.add(reading | changed, Spool(some))
    return path


def hostile(path: Path) -> Path:
    """Everything that a document or a policy can write is hostile."""
    return evaluation(
        path, question=HOSTILE, answer=HOSTILE, gold=[HOSTILE], source=HOSTILE, problem=HOSTILE,
        evidence=[HOSTILE], changes=[MemoryChange(0, HOSTILE, 9), MemoryChange(1, HOSTILE * 2, 18)],
        **{HOSTILE: HOSTILE, "__proto__": {"length": 1}},
    )  # fmt: skip


def endless(path: Path, turns: int = 5000, words: int = 600) -> Path:
    """A memory of so many words that is rewritten a little in every turn, and never rests."""
    texts = [" ".join(f"w{(k // 7 + j) % 997}" for j in range(words)) for k in range(turns - 1)]
    changes = [
        MemoryChange(k, f"turn {k} {text}", words + 2, k * 0.1) for k, text in enumerate(texts)
    ]
    return evaluation(path, turns, changes)


def parallel(path: Path, chunks: int = 3) -> Path:
    """Two rounds. The last two chunks note a fact each, the merge keeps the second alone."""
    said = {chunks - 2: [1], chunks - 1: [3], chunks: [3]}
    first = [_noting(k, k, 0, said.get(k)) for k in range(chunks)]
    merge = _noting(chunks, 0, 0, said[chunks], level=1, reads=(chunks - 2, chunks - 1))
    second = [_noting(chunks + 1 + k, k, 1, None, reads=(chunks,)) for k in range(chunks)]
    answer = dataclasses.replace(turn(2 * chunks + 1, "answer"), noted=False, reads=(chunks,))
    changes = [MemoryChange(chunks, "king", 1)]
    reading = {
        "task_id": "p", "question": "who ?", "answer": "Rex", "correct": 0.0, "finish": "stop",
        "evidence": ["Rex", "king"], "turns": 2 * chunks + 2,
    }  # fmt: skip
    with TraceFile(path) as file:
        file.add(reading, Spool(changes), Kept(Spool([*first, merge, *second, answer]), PIECES))
    return path


def _noting(chunk, unit, round_, said, level=0, reads=()):
    made = dataclasses.replace(turn(chunk), tokens=[*(said or [5]), 4], logprobs=[-0.1, -0.1])
    return dataclasses.replace(
        made, unit=unit, round=round_, level=level, noted=said is not None, reads=reads
    )
