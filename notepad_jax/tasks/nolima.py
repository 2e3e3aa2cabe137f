"""Task generator of the form of Adobe's NoLiMa: a needle that shares no word with its question.

The needle has a person live beside a landmark, and the question is which person has been to its
city (`one_hop`) or its country (`two_hop`); other needles tell of a trade by its tool, of an author
by a work, of a food by a diet. To find the needle is to know what belongs together, for no word of
the question stands in it. In the needles of the `_inverted` tasks the name stands behind the link.
Because our prose knows no people, 15 sentences of the same kind tell of others, for which the
question is not true: without them the only name would be the answer. The prose is without
distractors: no sentence of it has a word of any link or any question's object. What differs from
the published needles, which are not ours to copy, is listed in docs/evaluation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from notepad_jax.starter import vocabulary
from notepad_jax.tasks import recipe
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Fact, Sample
from notepad_jax.types import Task

NAMES = ("one_hop", "one_hop_inverted", "two_hop", "two_hop_inverted")
OTHERS = 15  # people about which something else is told
REPLY = "Reply with one name, nothing else."

_WORD = re.compile(r"[^\W\d_]+")
_SMALL = 3  # letters of words that sentences of the haystack may share with links: "and", "War"


@dataclasses.dataclass(frozen=True)
class AssociationKind:
    """One kind of association: how it is told, in both orders, and what is asked about it."""

    told: str
    inverted: str
    one_hop: str
    two_hop: str
    alone: bool = False  # what is asked about one may be true of others of the family


@dataclasses.dataclass(frozen=True)
class Association:
    """What is told of a person, and what follows from it, in one step and in two."""

    family: AssociationKind
    link: str
    one_hop: str
    two_hop: str

    def question(self, hops: str) -> str:
        return f"{getattr(self.family, hops).format(getattr(self, hops))} {REPLY}"

    def needle(self, name: str, inverted: bool) -> str:
        pattern = self.family.inverted if inverted else self.family.told
        return pattern.format(name=name, link=self.link)


_PLACE = AssociationKind(
    "{name} lives right beside the {link}.",
    "Right beside the {link} lives {name}.",
    "Which person has been to {}?",
    "Which person has been to {}?",
)
_TRADE = AssociationKind(
    "{name} cleaned the {link} before going home.",
    "The {link} was last cleaned by {name}.",
    "Which person might be {}?",
    "Which person might be found working {}?",
)
_WORK = AssociationKind(
    "{name} knows {link} by heart.",
    "Known by heart is {link}, for years already, by our {name}.",
    "Which person admires {}?",
    "Which person enjoys literature out of {}?",
)
_DIET = AssociationKind(
    "{name} follows the {link} rules strictly.",
    "Strictly are the {link} rules followed by our {name}.",
    "Which person cannot eat {}?",
    "Which person must refuse {}?",
    alone=True,
)
ASSOCIATIONS = tuple(
    Association(family, *parts)
    for family, rows in (
        (_PLACE, (
            ("Eiffel Tower", "Paris", "France"),
            ("Colosseum", "Rome", "Italy"),
            ("Brandenburg Gate", "Berlin", "Germany"),
            ("Sagrada Familia", "Barcelona", "Spain"),
            ("Acropolis", "Athens", "Greece"),
            ("Kremlin", "Moscow", "Russia"),
            ("Taj Mahal", "Agra", "India"),
            ("Forbidden City", "Beijing", "China"),
            ("Senso-ji temple", "Tokyo", "Japan"),
            ("Great Sphinx", "Giza", "Egypt"),
            ("Little Mermaid statue", "Copenhagen", "Denmark"),
            ("Rijksmuseum", "Amsterdam", "Holland"),
            ("Atomium", "Brussels", "Belgium"),
            ("Charles Bridge", "Prague", "Bohemia"),
            ("Schönbrunn palace", "Vienna", "Austria"),
            ("Hagia Sophia", "Istanbul", "Turkey"),
            ("Belém Tower", "Lisbon", "Portugal"),
            ("Wawel castle", "Krakow", "Poland"),
            ("CN Tower", "Toronto", "Canada"),
            ("Harbour Opera House", "Sydney", "Australia"),
            ("Copacabana beach", "Rio de Janeiro", "Brazil"),
            ("Petronas Towers", "Kuala Lumpur", "Malaysia"),
        )),
        (_TRADE, (
            ("stethoscope", "a doctor", "in a hospital"),
            ("blackboard", "a teacher", "in a school"),
            ("anvil", "a blacksmith", "in a forge"),
            ("chisel and marble block", "a sculptor", "in a studio"),
            ("kneading trough", "a baker", "in a bakery"),
            ("telescope", "an astronomer", "in an observatory"),
            ("barber scissors", "a hairdresser", "in a salon"),
            ("judge gavel", "a magistrate", "in a courtroom"),
            ("fire hose", "a rescuer", "in emergencies"),
            ("milking stool", "a dairy farmer", "in a cowshed"),
            ("cello", "a musician", "in an orchestra"),
            ("loom", "a weaver", "in a textile mill"),
        )),
        (_WORK, (
            ("Hamlet", "Shakespeare", "England"),
            ("Faust", "Goethe", "Weimar"),
            ("Don Quixote", "Cervantes", "Castile"),
            ("Anna Karenina", "Tolstoy", "Tsarist times"),
            ("The Divine Comedy", "Dante", "Florence"),
            ("The Odyssey", "Homer", "antiquity"),
            ("Les Misérables", "Victor Hugo", "Romanticism"),
            ("Peer Gynt", "Ibsen", "Norway"),
            ("Moby Dick", "Melville", "America"),
            ("Ulysses", "James Joyce", "Ireland"),
        )),
        (_DIET, (
            ("vegan", "cheese", "fondue"),
            ("kosher", "pork", "ham"),
            ("gluten-free", "wheat bread", "spaghetti"),
            ("lactose-free", "cream", "milkshakes"),
        )),
    )
    for parts in rows
)  # fmt: skip


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample: a document of `length` tokens by `count`, and its question.

    As in `ruler.make_task`; of the haystack, sentences that could distract are left out.

    Raises Unreachable, naming the task and the length, where the length cannot be reached;
    ValueError for an unknown task, a negative seed, a `count` that is not additive, or a
    haystack of which nothing is left.
    """
    if name not in NAMES:
        raise ValueError(f"NoLiMa has no task {name!r}; there are {', '.join(NAMES)}")
    prose = without_distractors(haystack)
    sample = recipe.sample(f"nolima/{name}", seed, length, prose, count)
    rng = sample.rng
    opening, *depths = rng.random(2 + OTHERS).tolist()
    people = _people(sample, rng)
    told = _told(rng)
    facts = [
        Fact(depth, one.needle(person, name.endswith("_inverted")), shown)
        for depth, one, person, shown in zip(
            depths, told, people, [people[0], *[""] * OTHERS], strict=True
        )
    ]
    document, evidence = recipe.hide(sample.task, facts, prose, opening, length, count)
    return Task(
        id=f"nolima-{name}-{length}-{seed}",
        question=told[0].question(name.removesuffix("_inverted")),
        document=document,
        answers=(people[0],),
        source=sample.task,
        metric="contains",
        evidence=evidence,
    )


def _people(sample: Sample, rng: np.random.Generator) -> list[str]:
    """First names, all different, that neither the prose nor a link has."""
    held, links = sample.haystack.holds, _words_of_links()
    drawn = rng.permutation(vocabulary.NAMES).tolist()
    taken = [name for name in drawn if name.lower() not in links and not held(name)]
    if len(taken) <= OTHERS:
        raise ValueError(
            f"the haystack holds all names but {len(taken)}, and {OTHERS + 1} are needed; "
            "use another text"
        )
    return taken[: OTHERS + 1]


def _told(rng: np.random.Generator) -> list[Association]:
    """The association that is asked about, and others of which the question is not true."""
    asked, *rest = (ASSOCIATIONS[i] for i in rng.permutation(len(ASSOCIATIONS)))
    others = [one for one in rest if not (asked.family.alone and one.family is asked.family)]
    return [asked, *others[:OTHERS]]


@functools.lru_cache(maxsize=4)
def without_distractors(haystack: Haystack) -> Haystack:
    """Returns the haystack without sentences that have a word of any link or question's object.

    Raises ValueError if nothing is left.
    """
    words = _words_of_links()
    kept = tuple(s for s in haystack.sentences if words.isdisjoint(_WORD.findall(s.lower())))
    if not kept:
        raise ValueError(
            f"every sentence of the haystack {haystack.name!r} has a word that would distract; "
            "use another text"
        )
    return Haystack(kept, haystack.name)


@functools.cache
def _words_of_links() -> frozenset[str]:
    """Lower-case words of the associations, but for small ones, which say nothing."""
    texts = (part for one in ASSOCIATIONS for part in (one.link, one.one_hop, one.two_hop))
    words = (word.lower() for text in texts for word in _WORD.findall(text))
    return frozenset(word for word in words if len(word) > _SMALL)
