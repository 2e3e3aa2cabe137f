"""A generated question-answering corpus: invented people, companies and towns, in English.

The stand-in for HotpotQA and SQuAD where they are not downloaded, and a pool of 70,000
paragraphs that is enough for 3.5 million tokens. Every paragraph tells about one person,
company or town, and every question needs two or three of them: a person's employer, then
the employer's founder. All names are made of our own syllables, so no model knows the
answers, and each seed has a world of its own. Nothing is stored but which person works
where: a paragraph is written when it is read. Above: suites; below:
data.foreign.corpus. An example of a two-step chain:

    Nora Penhurst is a glazier with Tolland Looms. ... / Tolland Looms makes rope and twine. It
    was founded by Hugo Marwick in 1893. ... -> Who founded the company Nora Penhurst works for?
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from notepad_jax.data.foreign.corpus import Corpus, GoldFact, Paragraph, Question, find_word

PEOPLE, COMPANIES, TOWNS = 56_000, 10_000, 4_000
KINDS = 7  # of questions; one is asked about each person

_FIRST = tuple(
    "Ada Agnes Albin Alma Amos Anders Anna Arne Aron Astrid Basil Beata Bella Boris Bruno Carl "
    "Celia Clara Conrad Cora Daisy Dora Edgar Edith Elin Elsa Emil Enid Erik Esther Eva Felix Finn "
    "Flora Frida Georg Gerda Greta Gustav Hanna Hans Harald Hedda Helga Henrik Hilda Hugo Ida Ines "
    "Inga Iris Irma Ivan Ivar Jakob Johan Jonas Julia Karin Karl Knut Lars Lea Lena Leo Lina Lotte "
    "Lukas Mabel Magda Maja Malte Marta Maud Milo Mona Nils Nora Olaf Olga Oscar Otto Paula Petra "
    "Ralf Rosa Rufus Selma Sigrid Sofia Sven Thea Tilda Ulla Viktor Wanda".split()
)
_LAST = (
    "Ash Bar Bel Brad Cald Cart Dal Dun El Farn Gar Hal Har Hol Kel Lang Lin Mar Mel Nor Pen Pres "
    "Rad Red Sel Stan Tol Thorn Wake Wen Whit Wyn".split(),
    "bourne bury combe croft den dike field ford gate ham hurst ington land leigh ley low mere "
    "mont more ridge shaw stead ton well wick wood worth yard".split(),
)
_TOWN = (
    "Aber Alder Arn Auch Bal Bex Bram Brin Caer Carn Cor Cray Crick Dar Del Dor Drum Eden Elm "
    "Ester Fal Fen Glas Glen Gos Grim Hart Hex Ilk Inver Ives Keld Kil Kin Lam Led Lew Loch Lud "
    "Mal Mink Mor Nant Ness Nes Ock Or Ost Pet Pol Pont Quor Ros Rud Rye Sax Skel Spal Strat Tam "
    "Tar Teign Tin Tre Tyn Ul Usk Ven Wad Wal Wey Win Wol Yar Yel Zel".split(),
    "adon amble ander ardine arth astow avon bach beck bost brook by caster chester cliff cot dale "
    "ditch dock fell firth forth garth gill grave haven head holm hythe kirk linn march mond moor "
    "mouth ness oak pool port quay rick rigg rock rose sall scale side sley stoke stow thorpe "
    "thwaite tor vale ville wall ward wath wyke".split(),
)
_TRADES = tuple(
    "Bakery Bindery Boatyard Brewery Brickworks Cannery Clockworks Creamery Dairy Dyeworks Foundry "
    "Glassworks Ironworks Laundry Looms Mills Nurseries Pottery Press Printworks Quarries "
    "Ropeworks Sawmill Tannery Timber Toolworks".split()
)
_RIVERS = tuple(
    "Ainsle Arkle Bovern Brathe Calden Carrow Cleddow Corve Dacre Dovern Eamon Elwy Erme Feswell "
    "Frone Garron Gaunless Grendle Hamble Hodder Ithon Kenwyn Kirtle Ladden Levendle Lugg Lynher "
    "Mardle Medlock Mimram Nadder Nevern Okemet Orrin Ottery Pardle Petteril Quenn Ribble Roden "
    "Rothay Salwarp Seph Skerne Sprindle Tamar Tavy Tillow Torridge Tweddle Ulva Uredale Vyrnwy "
    "Wampool Wansbeck Wavrith Wenning Wharfe Wissey Wreake Yarrow Yeo Ysker Zarn".split()
)
# No March and no May: they stand in sentences that tell of no month.
_MONTHS = tuple(
    "January February April June July August September October November December".split()
)
_JOBS = tuple(
    "accountant apprentice archivist bookkeeper carpenter chemist clerk cook designer draughtsman "
    "driver electrician engineer fitter foreman glazier inspector joiner librarian machinist mason "
    "mechanic nurse packer painter pattern-maker photographer plumber porter salesman secretary "
    "smith stoker surveyor translator watchman welder".split()
)
_HOBBIES = tuple(
    "keeping bees|growing roses|mending clocks|long walks|old maps|choral singing|chess by post|"
    "rowing|watching birds|baking bread|collecting stamps|amateur theatre|playing the fiddle|"
    "fishing for trout|cycling|astronomy|knitting|woodcarving|village history|cold-water swimming|"
    "making cheese|breeding rabbits|crossword puzzles|painting in watercolour".split("|")
)
_GOODS = tuple(
    "rope and twine|garden tools|roof tiles|paper bags|wedding cakes|oak barrels|brass fittings|"
    "school slates|umbrellas|fishing nets|candles|enamel pots|leather satchels|window frames|"
    "woollen blankets|pickled herring|almanacs|cart wheels|soap|church bells|bicycle saddles|"
    "felt hats|ginger biscuits|kitchen scales".split("|")
)
_SIGHTS = tuple(
    "a covered market|a leaning clock tower|a salt museum|two stone bridges|a botanical garden|"
    "the ruins of an abbey|a row of almshouses|a windmill that still turns|a narrow-gauge railway|"
    "a lido from the thirties|a school for lacemakers|the oldest post office in the county|"
    "a statue of a goose|a tannery turned into flats|a hospital with a walled orchard|"
    "a weir full of herons".split("|")
)


def synthetic_corpus(seed: int) -> Corpus:
    """Returns the world of `seed`: 56,000 questions over 70,000 paragraphs, written on demand.

    A paragraph has 55 to 75 words. About a sixth of the questions need three paragraphs, the
    others two. Raises ValueError for a negative seed.
    """
    if seed < 0:
        raise ValueError(f"the world's seed is {seed}; it must be 0 or more")
    world = _World.of(seed)
    questions = _Written(PEOPLE, world.question)
    paragraphs = _Written(PEOPLE + COMPANIES + TOWNS, world.paragraph)
    return Corpus(f"invented-{seed}", questions, paragraphs, {})


@dataclasses.dataclass(frozen=True)
class _Written(Sequence):
    """A sequence whose items are made when they are asked for."""

    size: int
    make: Any  # number -> item

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self.size:
            raise IndexError(f"there is no number {number} among {self.size}")
        return self.make(number)


@dataclasses.dataclass(frozen=True, eq=False)
class _World:
    """A world's data: names by number, and a table of choices for every person, company, town.

    Paragraph numbers are people first, then companies, then towns.
    """

    seed: int
    person_names: np.ndarray  # int [PEOPLE]: which of all first and last names
    company_names: np.ndarray
    town_names: np.ndarray
    person: dict[str, np.ndarray]  # each int [PEOPLE]
    company: dict[str, np.ndarray]
    town: dict[str, np.ndarray]

    @classmethod
    def of(cls, seed: int) -> _World:
        rng = np.random.default_rng([seed, 0x1A7E])

        def some(total: int, count: int) -> np.ndarray:
            return rng.permutation(total)[:count]

        def table(count: int, **choices: int) -> dict[str, np.ndarray]:
            return {name: rng.integers(0, upper, count) for name, upper in choices.items()}

        lasts = len(_last_names())
        return cls(
            seed=seed,
            person_names=some(len(_FIRST) * lasts, PEOPLE),
            company_names=some(lasts * len(_TRADES), COMPANIES),
            town_names=some(len(_town_names()), TOWNS),
            person=table(
                PEOPLE, kind=KINDS, employer=COMPANIES, birthplace=TOWNS, year=60,
                job=len(_JOBS), hobby=len(_HOBBIES), since=20, form=3,
            ),
            company=table(
                COMPANIES, seat=TOWNS, founder=len(_FIRST) * lasts, year=140,
                goods=len(_GOODS), hands=400, form=3,
            ),
            town=table(
                TOWNS, river=len(_RIVERS), month=len(_MONTHS), county=len(_RIVERS),
                sight=len(_SIGHTS), people=900, form=3,
            ),
        )  # fmt: skip

    # ------------------------------------------------------------ names

    def name(self, person: int) -> str:
        return _full_name(self.person_names[person])

    def company_name(self, company: int) -> str:
        last, trade = divmod(int(self.company_names[company]), len(_TRADES))
        return f"{_last_names()[last]} {_TRADES[trade]}"

    def town_name(self, town: int) -> str:
        return _town_names()[self.town_names[town]]

    # ------------------------------------------------------------ paragraphs

    def paragraph(self, number: int) -> Paragraph:
        if number < PEOPLE:
            return self._about_person(number)
        number -= PEOPLE
        return (
            self._about_company(number)
            if number < COMPANIES
            else self._about_town(number - COMPANIES)
        )

    def _about_person(self, i: int) -> Paragraph:
        own = {name: int(column[i]) for name, column in self.person.items()}
        name, job, hobby = self.name(i), _JOBS[own["job"]], _HOBBIES[own["hobby"]]
        employer, birthplace = self.company_name(own["employer"]), self.town_name(own["birthplace"])
        born, since = 1925 + own["year"], 3 + own["since"]
        forms = (
            f"{name} works for {employer} as {_a(job)} and has done so for {since} years. Born in "
            f"{born} in {birthplace}, the eldest of four children, {name} learnt the trade from an "
            f"uncle and came to the firm by way of a notice in the local paper. Colleagues know "
            f"little about {name}'s evenings, except that they are given to {hobby}.",
            f"{birthplace} is the birthplace of {name}, who was born there in {born} above a "
            f"chandler's shop. After school and two years at sea, {name} trained as {_a(job)} and "
            f"took a post with {employer}, where the same desk has been {name}'s for {since} "
            f"years. On Sundays there is time for {hobby}, which began as a wager.",
            f"Few people in the trade have not heard of {name}, {_a(job)} of {since} years' "
            f"standing who is employed by {employer}. The family had lived in {birthplace} for "
            f"generations when {name} was born there in {born}, and left after a flood. Asked for "
            f"a weakness, {name} names {hobby} without a moment's thought.",
        )
        return Paragraph(name, forms[own["form"]])

    def _about_company(self, i: int) -> Paragraph:
        own = {name: int(column[i]) for name, column in self.company.items()}
        name, seat, founder = self.company_name(i), self.town_name(own["seat"]), self._founder(i)
        goods, founded, hands = _GOODS[own["goods"]], 1790 + own["year"], 20 + own["hands"]
        forms = (
            f"{name} makes {goods}. The business was founded in {founded} by {founder}, who began "
            f"with a borrowed cart and one apprentice. Its head office is in {seat}, in a building "
            f"that was once a school, and about {hands} people are on its books. Visitors are "
            f"shown round on the first Friday of the month.",
            f"The head office of {name} stands in {seat}, opposite the station. {founder} founded "
            f"the firm in {founded} on the strength of a small inheritance, and it has sold "
            f"{goods} ever since, through two fires and a long strike. Today it employs some "
            f"{hands} people, many of them in the third generation.",
            f"Anyone who buys {goods} has probably met the name of {name}. With {hands} employees "
            f"and its head office in {seat}, it is among the larger firms of its kind. It goes "
            f"back to {founder}, by whom it was founded in {founded}, and whose portrait still "
            f"hangs in the canteen beside the prices.",
        )
        return Paragraph(name, forms[own["form"]])

    def _about_town(self, i: int) -> Paragraph:
        own = {name: int(column[i]) for name, column in self.town.items()}
        name, river, month = self.town_name(i), _RIVERS[own["river"]], _MONTHS[own["month"]]
        county, sight, people = self._county(i), _SIGHTS[own["sight"]], 1100 + 37 * own["people"]
        forms = (
            f"{name} is a town of {people} inhabitants in the county of {county}. It lies on the "
            f"river {river}, which used to drive its mills and now and then floods its cellars. "
            f"The annual fair is held in {month} and lasts three days. Guide books mention "
            f"{sight}; the inhabitants would rather mention the bakery.",
            f"Visitors come to {name} for {sight}, and in {month} for the annual fair, which is "
            f"said to be as old as the town. The river {river} runs through the middle of it. With "
            f"{people} inhabitants it is neither the largest nor the smallest town of the county "
            f"of {county}, a fact that its mayors like to dwell upon.",
            f"On the river {river}, in the county of {county}, lies {name}, where {people} people "
            f"live. The town grew around a ferry, has {sight}, and was without a railway until "
            f"quite late. Its annual fair takes place in {month}, when every spare room is let and "
            f"no shop keeps its usual hours.",
        )
        return Paragraph(name, forms[own["form"]])

    def _founder(self, company: int) -> str:
        return _full_name(self.company["founder"][company])

    def _county(self, town: int) -> str:
        return f"{_RIVERS[self.town['county'][town]]}shire"

    # ------------------------------------------------------------ questions

    def question(self, i: int) -> Question:
        """The question about person i: which of the kinds, its chain of paragraphs, its answer."""
        employer, home = (int(self.person[name][i]) for name in ("employer", "birthplace"))
        seat = int(self.company["seat"][employer])
        who, kind = self.name(i), int(self.person["kind"][i])
        works, town = PEOPLE + employer, PEOPLE + COMPANIES
        # The texts of a chain, and after each the paragraph's words that lead on.
        chain: list[tuple[int, str]] = [(i, self.company_name(employer))]
        if kind in (3, 4, 5):
            chain = [(i, self.town_name(home))]
        if kind == 0:
            text = f"In which town is the head office of the company that employs {who}?"
            chain += [(works, self.town_name(seat))]
        elif kind == 1:
            text = f"In which year was the company that employs {who} founded?"
            chain += [(works, str(1790 + self.company["year"][employer]))]
        elif kind == 2:
            text = f"Who founded the company for which {who} works?"
            chain += [(works, self._founder(employer))]
        elif kind == 3:
            text = f"On which river lies the town where {who} was born?"
            chain += [(town + home, _RIVERS[self.town["river"][home]])]
        elif kind == 4:
            text = f"In which month is the annual fair of the town where {who} was born?"
            chain += [(town + home, _MONTHS[self.town["month"][home]])]
        elif kind == 5:
            text = f"To which county does the birthplace of {who} belong?"
            chain += [(town + home, self._county(home))]
        else:
            text = (
                f"On which river lies the town where the company that employs {who} has its "
                f"head office?"
            )
            chain += [(works, self.town_name(seat))]
            chain += [(town + seat, _RIVERS[self.town["river"][seat]])]
        return Question(
            id=f"{self.seed}-{i}",
            text=text,
            answers=(chain[-1][1],),
            gold=tuple(number for number, _ in chain),
            near=(),
            facts=tuple(
                GoldFact(words, number, find_word(words, self.paragraph(number).text))
                for number, words in chain
            ),
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _full_name(number: int) -> str:
    first, last = divmod(int(number), len(_last_names()))
    return f"{_FIRST[first]} {_last_names()[last]}"


@functools.cache
def _last_names() -> tuple[str, ...]:
    return tuple(start + end for start in _LAST[0] for end in _LAST[1])


@functools.cache
def _town_names() -> tuple[str, ...]:
    """Town names in a fixed order; none is a surname, too, and none is there twice."""
    names = dict.fromkeys(start + end for start in _TOWN[0] for end in _TOWN[1])
    surnames = set(_last_names())
    return tuple(name for name in names if name not in surnames)
