"""A section is read once: what cannot be is refused in one line, and what was read stays."""

from __future__ import annotations

import dataclasses

import pytest

from notepad_jax import keys
from notepad_jax.keys import SHARE, also, key, whole, words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    share: float = key("share", "of something", SHARE)
    kinds: tuple[str, ...] = key("list", "of kinds", words("a", "b"), default=())

    def __post_init__(self):
        if self.share == 0.5:
            raise ValueError("share is a half, which nobody wants")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int = key("steps", "how many", whole(1))
    rate: float = also(default=0.1)
    loud: bool = key("true, false", "or quiet", default=False)
    inner: Inner
    many: tuple[Inner, ...] = ()
    perhaps: Inner | None = None


SAID = {"steps": 3, "inner": {"share": 1, "kinds": ["a"]}, "many": [{"share": 0.25}]}


def test_what_is_said_becomes_the_section():
    read = keys.read(Outer, SAID)
    one = Inner(share=1.0, kinds=("a",))
    assert read == Outer(steps=3, inner=one, many=(Inner(share=0.25),))
    assert type(read.inner.share) is float and read.perhaps is None
    assert keys.read(Outer, keys.plain(read)) == read  # as JSON would give it back
    flat = keys.flat(read)
    assert flat["inner.share"] == 1.0 and "perhaps" not in flat and flat["rate"] == 0.1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"step": 3}, "there is no config key 'step'; did you mean steps?"),
        ({"inner": {"shar": 1}}, "there is no config key 'inner.shar'; did you mean inner.share?"),
        ({"inner": {"kinds": ["a"]}}, "there is no key inner.share"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": True}, "steps needs a whole number, and got True"),
        ({"steps": 3.0}, "steps needs a whole number, and got 3.0"),
        ({"rate": "x"}, "rate needs a number, and got 'x'"),
        ({"rate": float("nan")}, "rate is nan; it must be finite, in float32"),
        ({"loud": 1}, "loud needs true or false, and got 1"),
        ({"inner": 3}, "inner is 3, and is a section with keys of its own"),
        ({"inner": {"share": 2}}, "inner.share is 2.0; it must be at least 0 and at most 1"),
        ({"inner": {"share": 1, "kinds": ["c"]}}, "inner.kinds has 'c'; use one of a, b"),
        ({"inner": {"share": 1, "kinds": "a"}}, "inner.kinds needs a list of texts, and got 'a'"),
        ({"inner": {"share": 0.5}}, "in section inner: share is a half"),
        ({"many": [{"share": 2}]}, "many.share is 2.0"),
        ({"many": 3}, "many needs a list of sections, and got 3"),
        ({"many": [3]}, "many needs a list of sections, and got [3]"),
    ],
)
def test_what_cannot_be_is_one_line(change, line):
    with pytest.raises(ValueError) as caught:
        keys.read(Outer, SAID | change)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_all_that_is_missing_is_named():
    assert list(keys.missing(Outer, {})) == ["steps", "inner.share", "inner.kinds"]
    assert list(keys.missing(Outer, {"steps": 1, "inner": {}})) == ["inner.share"]


def test_a_copy_has_other_values_and_the_first_keeps_its_own():
    read = keys.read(Outer, SAID)
    other = keys.changed(read, {"inner.share": 0.75, "inner.kinds": (), "steps": 9})
    assert (other.steps, other.inner) == (9, Inner(share=0.75)) and read.inner.share == 1
    with pytest.raises(ValueError, match="nobody wants"):
        keys.changed(read, {"inner.share": 0.5})


def test_sections_made_by_hand_are_checked_alike():
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        keys.check(Outer(steps=0, inner=Inner(share=1.0)))
