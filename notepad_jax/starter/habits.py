"""The habits of the teacher of lessons: how often it does what is right.

Above: lessons, mixed_lessons, rounds_lessons, and setup.config, of whose files it is a section.
"""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import SHARE, key


@dataclasses.dataclass(frozen=True)
class Habits:
    """The teacher's odds; each is the probability of doing the right thing."""

    write_found: float = key(
        "probability",
        "that the teacher writes down a fact it has found. Well below 1, or there is nothing to "
        "teach later; well above 0, or there is nothing to reinforce",
        SHARE,
    )
    keep: float = key(
        "probability",
        "that it keeps a note over an ordinary chunk",
        SHARE,
    )
    keep_at_chapter: float = key(
        "probability",
        "that it keeps a note over a chunk with a new chapter in it",
        SHARE,
    )
    merge: float = key("probability", "with `rounds`: that it takes over what notes say", SHARE)
    leave: float = key(
        "probability",
        "with `rounds`: that it leaves early where the memory has all; 0: it knows no way to",
        SHARE,
    )
    stay: float = key(
        "probability", "with `habits.leave`: that it reads on where something is missing", SHARE
    )
