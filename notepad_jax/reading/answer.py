"""The state machine of long answers, written over several contexts; beside the memory agent's.

`AnswerState` -> prompt -> what was written -> `AnswerState`, a context at a time. Every context
begins with the same question and memory (or document) and goes on from the last `carry` tokens of
what was written so far, as ids, never decoded and encoded again; everything before them is
forgotten. So an answer may be as long as it wants in contexts of one size: Delethink (Aghajohari
et al. 2025, The Markovian Thinker), where a policy learns to write down in time what it will
still need. An answer of one context is the same machine, taken one step. All of it is pure.
Above: memory_agent, which takes the steps; below: types.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from notepad_jax.types import NO_TOKENS, Prompt, Tokens, tokens


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerState:
    """The whole state of an answer in progress, once the chunks are read; tiny, replayable."""

    asked: Prompt  # what every context of the answer begins with
    memory_tokens: Tokens
    turns: int  # update turns that were made
    written: Tokens  # by all contexts so far, joined
    carried: Tokens  # the end of it, from which the next context goes on
    contexts: int  # that have ended


def start(asked: Prompt, memory: Tokens = NO_TOKENS, turns: int = 0) -> AnswerState:
    """Returns the state before the first context: nothing was written."""
    return AnswerState(asked, tokens(memory), turns, NO_TOKENS, NO_TOKENS, 0)


def own_prefix(asked: Prompt) -> Prompt:
    """Returns the prompt with all but its last token in the shared part.

    It holds the reading's own memory, so no other reading shares it; but every context of this
    one does, and what is carried over comes behind it.
    """
    whole = asked.tokens
    return Prompt(tokens(whole[:-1]), tokens(whole[-1:]))


def prompt(state: AnswerState) -> Prompt:
    """Returns the next context's prompt: what asks, and what goes on from there."""
    if not len(state.carried):
        return state.asked
    tail = tokens(np.concatenate([state.asked.tail, state.carried]))
    return Prompt(state.asked.shared, tail, begun=len(state.carried))


def advance(state: AnswerState, said: Tokens, carry: int) -> AnswerState:
    """Returns the state after a context that wrote `said` (the stop token left out).

    The next one shows the last `carry` tokens of everything, or all of it where it is shorter.
    """
    written = tokens(np.concatenate([state.written, said]))
    carried = tokens(written[max(0, len(written) - carry) :])
    return dataclasses.replace(state, written=written, carried=carried, contexts=state.contexts + 1)
