"""BABILong's tasks: each is answered from the document's text alone, by a replay of the story."""

from __future__ import annotations

import collections
import hashlib
import re

import pytest
import scipy.stats

from notepad_jax.scoring import metrics
from notepad_jax.tasks import babilong, haystack, recipe, suites

_PIECE = re.compile(r"\w+|[^\w\s]")
_NAME = r"Bill|Daniel|Fred|Jeff|John|Julie|Mary|Sandra"
_WENT = r"(?:went|went back|moved|journeyed|travelled) to the (\w+)\."
_WALK = re.compile(rf"((?:{_NAME})(?: and (?:{_NAME}))?|\w+(?: that)? (?:she|he|they)) {_WENT}")
_TAKE = re.compile(rf"({_NAME}) (?:took|got|grabbed|picked up) the (\w+)(?: there)?\.")
_DROP = re.compile(rf"({_NAME}) (?:dropped|left|discarded|put down) the (\w+)(?: there)?\.")
_GIVE = re.compile(
    rf"({_NAME}) (?:gave|handed|passed) the (\w+) to ({_NAME})(?: there)?\."
)  # fmt: skip
_SEEN = re.compile(
    rf"({_NAME}) is (in|not in|no longer in|either in) the (\w+)(?: or the (\w+))?\."
)
_SIDE = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
_FORMS = {"walk": _WALK, "take": _TAKE, "drop": _DROP, "give": _GIVE, "seen": _SEEN, "side": _SIDE}
_BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
PLAYED = ("qa2", "qa3", "qa5", "qa6", "qa7", "qa8")
NEVER_SILENT = tuple(name for name in babilong.NAMES if name not in ("qa7", "qa8"))


def count(text):
    return len(_PIECE.findall(text))


def make(name, seed, length=1024, straw=None):
    return babilong.make_task(name, seed, length, straw or haystack.noise(), count)


def text_of(task):
    return "".join(task.document.pieces())


def story(text):
    """What the text tells, in its order: (place, form, words)."""
    found = [(m.start(), form, m.groups()) for form, p in _FORMS.items() for m in p.finditer(text)]
    return sorted(found)


class Reader:
    """Replays a story and answers bAbI's questions about it; knows nothing of the generator."""

    def __init__(self, text):
        self.at, self.holder, self.lies, self.trail = {}, {}, {}, collections.defaultdict(list)
        self.gifts, self.sides, self.last, self.spoken = [], {}, {}, []
        for _, form, words in story(text):
            getattr(self, form)(*words)

    def walk(self, who, room):
        if not re.search(r"\b(?:she|he|they)$", who):
            self.spoken = who.split(" and ")
        for person in self.spoken:
            assert self.at.get(person) != room  # nobody goes where they are
            self.at[person] = room
            self.last[person] = ("in", room, None)
            for thing in [t for t, holder in self.holder.items() if holder == person]:
                self.trail[thing].append(room)

    def take(self, who, thing):
        assert thing not in self.holder  # things are where they are taken
        assert self.lies.pop(thing, self.at[who]) == self.at[who]
        self.holder[thing] = who
        self.trail[thing].append(self.at[who])

    def drop(self, who, thing):
        assert self.holder.pop(thing) == who
        self.lies[thing] = self.at[who]

    def give(self, who, thing, to):
        assert self.holder.pop(thing) == who != to
        assert self.at.setdefault(to, self.at[who]) == self.at[who]
        self.holder[thing] = to
        self.gifts.append((who, thing, to))

    def seen(self, who, how, room, other):
        self.last[who] = (how, room, other)
        self.at.pop(who, None)

    def side(self, room, side, other):
        self.sides[other, side], self.sides[room, _BACK[side]] = room, other

    def answer(self, question):
        question = question.partition("?")[0]
        for pattern, solve in self.QUESTIONS.items():
            if asked := re.fullmatch(pattern, question):
                return solve(self, *asked.groups())
        raise AssertionError(question)

    def whether(self, who, room):
        how, said, other = self.last[who]
        if how.startswith("no"):
            assert said == room  # else nobody could know
            return "no"
        if room not in (said, other):
            return "no"
        return "maybe" if how == "either in" else "yes"

    def before(self, thing, room):
        rooms = [r for i, r in enumerate(self.trail[thing]) if [r] != self.trail[thing][i - 1 : i]]
        assert rooms.count(room) == 1
        return rooms[rooms.index(room) - 1]

    def carried(self, who):
        return [thing for thing, holder in self.holder.items() if holder == who]

    def gift(self, wanted, **known):
        gifts = [dict(zip(("who", "thing", "to"), gift, strict=True)) for gift in self.gifts]
        (found,) = {gift[wanted] for gift in gifts if known.items() <= gift.items()}
        return found

    QUESTIONS = {
        r"Where is the (\w+)": lambda r, thing: r.trail[thing][-1],
        r"Where is (\w+)": lambda r, who: r.at[who],
        r"Where was the (\w+) before the (\w+)": before,
        r"What is (north|south|east|west) of the (\w+)": lambda r, side, room: r.sides[room, side],
        r"What is the (\w+) (\w+) of": lambda r, room, side: r.sides[room, _BACK[side]],
        r"Is (\w+) in the (\w+)": whether,
        r"How many objects is (\w+) carrying": lambda r, who: ("none", "one", "two", "three")[
            len(r.carried(who))
        ],
        r"What is (\w+) carrying": lambda r, who: ",".join(r.carried(who)) or "nothing",
        r"What did (\w+) give to (\w+)": lambda r, who, to: r.gift("thing", who=who, to=to),
        r"Who gave the (\w+) to (\w+)": lambda r, thing, to: r.gift("who", thing=thing, to=to),
        r"Who gave the (\w+)": lambda r, thing: r.gift("who", thing=thing),
        r"Who received the (\w+)": lambda r, thing: r.gift("to", thing=thing),
        r"Who did (\w+) give the (\w+) to": lambda r, who, t: r.gift("to", who=who, thing=t),
    }


@pytest.mark.parametrize("name", babilong.NAMES)
def test_a_reader_of_the_text_gets_everything_right(name):
    for seed in range(100):
        task = make(name, seed)
        said = Reader(text_of(task)).answer(task.question)
        assert (said,) == task.answers, task.question
        judged = (task.answers, task.metric, task.contract, task.question)
        assert metrics.score(said, *judged).value == 1
        assert metrics.score("I give up", *judged).value == 0
        assert (task.source, task.contract) == (f"babilong/{name}", "plain")


@pytest.mark.parametrize("name", babilong.NAMES)
def test_repeating_the_question_with_the_answer_is_right(name):
    task = make(name, 5)
    said = f"{task.question.partition('?')[0]}: {task.answers[0]}"
    assert metrics.score(said, task.answers, task.metric, "plain", task.question).value == 1


@pytest.mark.parametrize("name", babilong.NAMES)
@pytest.mark.parametrize("length", [512, 1000, 4096, 32768])
def test_lengths_are_met_from_below(name, length):
    straw = haystack.stdlib_prose()
    for seed in range(3):
        assert 0.98 * length < count(text_of(make(name, seed, length, straw))) <= length


@pytest.mark.parametrize("name", babilong.NAMES)
def test_one_seed_is_one_story_at_every_length(name):
    short, long = make(name, 11, 1024), make(name, 11, 16384)
    assert (short.question, short.answers) == (long.question, long.answers)
    assert [e.text for e in short.evidence] == [e.text for e in long.evidence]
    for near, far in zip(short.evidence, long.evidence, strict=True):
        assert abs(near.place - far.place) < 0.2
    told = [[words for _, *words in story(text_of(task))] for task in (short, long)]
    assert told[0] == told[1]


def test_three_and_a_half_million_tokens_are_sized_without_being_written():
    task = make("qa3", 1, 3_500_000)
    characters = sum(map(len, task.document.pieces()))
    assert characters > 10_000_000
    assert Reader(text_of(make("qa3", 1))).answer(task.question) == task.answers[0]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("qa1", "0995067c08371c1f"),
        ("qa3", "02132d1a4943e8b4"),
        ("qa4", "4a4338f393606700"),
        ("qa5", "968c31acab34c148"),
        ("qa8", "d880d714fd8bb053"),
        ("qa10", "48cd09c2a755dcdd"),
        ("qa13", "9aeed3b5d5a6f07f"),
    ],
)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(name, digest):
    one, same, other = (make(name, seed) for seed in (7, 7, 8))
    assert text_of(one) == text_of(same) != text_of(other)
    told = text_of(one) + one.question + "".join(one.answers)
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", babilong.NAMES)
def test_evidence_stands_where_it_is_said_to_stand(name):
    for seed in range(20):
        task = make(name, seed)
        text = text_of(task)
        starts = {place: words for place, _, words in story(text)}
        places = [round(found.place * len(text)) for found in task.evidence]
        assert places == sorted(places)
        for place, found in zip(places, task.evidence, strict=True):
            assert found.text in starts[place]  # the sentence begins there and says it


@pytest.mark.parametrize("name", NEVER_SILENT)
def test_the_answer_rests_on_its_evidence(name):
    """Where evidence is a room or a person, it is the answer itself, or decides it."""
    for seed in range(40):
        task = make(name, seed)
        (found,) = task.evidence
        if task.answers[0] not in ("yes", "no", "maybe"):
            assert found.text == task.answers[0]
        elif task.answers[0] == "yes":
            assert found.text in task.question
        elif task.answers[0] == "maybe":
            assert found.text not in task.question.partition("?")[0]


@pytest.mark.parametrize("name", ["qa7", "qa8"])
def test_evidence_is_each_thing_that_is_carried(name):
    for seed in range(40):
        task = make(name, seed)
        things = [found.text for found in task.evidence]
        who = re.search(r"is (\w+) carrying", task.question)[1]
        assert things == Reader(text_of(task)).carried(who)


def answers(name, seeds=400):
    return collections.Counter(make(name, seed, 512).answers[0] for seed in range(seeds))


@pytest.mark.parametrize("name", ["qa6", "qa9"])
def test_yes_and_no_are_as_likely(name):
    assert scipy.stats.binomtest(answers(name)["yes"], 400).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "share"), [("qa1", 0.25), ("qa2", 0.25), ("qa3", 0.25), ("qa4", 0.25), ("qa5", 0.25),
                        ("qa7", 0.55), ("qa8", 0.5), ("qa10", 0.5), ("qa13", 0.25)],
)  # fmt: skip
def test_no_answer_is_right_much_more_often_than_others(name, share):
    found = answers(name)
    assert max(found.values()) < share * 400
    if name == "qa10":
        assert min(found[word] for word in ("yes", "no", "maybe")) > 60
    if name == "qa7":
        assert set(found) == {"none", "one", "two", "three"}


def test_facts_lie_all_over_the_document():
    places = [place for seed in range(200) for place in [make("qa4", seed).evidence[0].place]]
    # One of two facts, whichever is asked for: uniform as each of two uniform depths is.
    assert scipy.stats.kstest(places, "uniform").pvalue > 1e-3


def test_how_many_events_a_story_has():
    for name in PLAYED:
        sizes = [len(story(text_of(make(name, seed)))) for seed in range(60)]
        assert max(sizes) <= 36 and max(sizes) - min(sizes) >= 8, name


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="no task 'qa14' of BABILong; there are qa1, qa2"):
        make("qa14", 0)
    with pytest.raises(ValueError, match="seed of a sample is -1"):
        make("qa1", -1)
    with pytest.raises(recipe.Unreachable, match=r"babilong/qa3 cannot be 30 tokens long"):
        make("qa3", 0, 30)


def test_the_suite_makes_and_leaves_out():
    sources = suites.SuiteSources(count, "noise")
    made, left_out = suites.by_length(
        "babilong", ("qa1", "qa3"), (50, 1000), 2, 0, sources, lambda task: None
    )
    assert [task.source for task in made[1000]] == ["babilong/qa1"] * 2 + ["babilong/qa3"] * 2
    assert left_out and all(isinstance(one, recipe.Unreachable) for one in left_out)
    assert suites.names("babilong", (), sources) == babilong.NAMES
