"""Forty questions about Genesis and Exodus (King James Version), written by hand.

Most ask for what the book says in one place, in a few words: a name, a number, a thing. Five want
a list; three (one of these) need two facts, a verse or ten chapters apart. They are spread over
the book, at most 6% of it from each to the next, and ask in its own words as far as they can:
small models read them. Every question names the verse that answers it and the words there, which
stand in the book exactly once; `book` refuses a text that lacks them. What a model knows of this
book without reading it has to be measured, too (docs/evaluation.md says how).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fact:
    """Words of a verse; they stand nowhere else in the book."""

    where: str  # such as "Genesis 5:20"
    words: str


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, and all that answers it."""

    question: str
    answers: tuple[str, ...]  # as the book has them; the first one stands in `facts`
    facts: tuple[Fact, ...]  # in the book's order
    number: int = 0  # if the answer is one: it is right in figures and modern words, too
    all_wanted: bool = False  # the answers are items of a list, each of which stands in `facts`


def _ask(question: str, where: str, words: str, *answers: str, number: int = 0) -> Question:
    """A question that one verse answers."""
    return Question(question, answers, (Fact(where, words),), number)


def _list(question: str, items: tuple[str, ...], *facts: Fact) -> Question:
    """A question whose answer is all of `items`."""
    return Question(question, items, facts, all_wanted=True)


GENESIS = (
    _ask(
        "What is the name of the third river that went out of Eden?",
        "Genesis 2:14",
        "And the name of the third river is Hiddekel",
        "Hiddekel",
    ),
    _list(
        "What were the names of the two wives that Lamech took?",
        ("Adah", "Zillah"),
        Fact("Genesis 4:19", "the name of the one was Adah, and the name of the other Zillah."),
    ),
    _ask(
        "How many years were all the days of Jared?",
        "Genesis 5:20",
        "And all the days of Jared were nine hundred sixty and two years: and he died.",
        "nine hundred sixty and two",
        number=962,
    ),
    _ask(
        "Of what wood was Noah to make the ark?",
        "Genesis 6:14",
        "Make thee an ark of gopher wood;",
        "gopher",
    ),
    _ask(
        "Who begat Nimrod?",
        "Genesis 10:8",
        "And Cush begat Nimrod: he began to be a mighty one in the earth.",
        "Cush",
    ),
    _ask(
        "What had the builders of the city and the tower for morter?",
        "Genesis 11:3",
        "And they had brick for stone, and slime had they for morter.",
        "slime",
    ),
    _ask(
        "How many trained servants, born in his own house, did Abram arm?",
        "Genesis 14:14",
        "he armed his trained servants, born in his own house, three hundred and eighteen,",
        "three hundred and eighteen",
        number=318,
    ),
    _ask(
        "How old was Abram when Hagar bare Ishmael?",
        "Genesis 16:16",
        "And Abram was fourscore and six years old, when Hagar bare Ishmael to Abram.",
        "fourscore and six",
        number=86,
    ),
    Question(  # of two facts
        "How many years did the son of Hagar live?",
        ("hundred and thirty and seven",),
        (
            Fact("Genesis 16:15", "And Hagar bare Abram a son:"),
            Fact(
                "Genesis 25:17",
                "And these are the years of the life of Ishmael, an hundred and thirty and seven"
                " years:",
            ),
        ),
        number=137,
    ),
    _ask(
        "How many pieces of silver did Abimelech give to Abraham, the brother of Sarah?",
        "Genesis 20:16",
        "And unto Sarah he said, Behold, I have given thy brother a thousand pieces of silver:",
        "thousand",
        number=1000,
    ),
    _ask(
        "How many shekels of silver did Abraham weigh to Ephron?",
        "Genesis 23:16",
        "in the audience of the sons of Heth, four hundred shekels of silver,",
        "four hundred",
        number=400,
    ),
    Question(  # of two facts
        "What was the name of the nurse of Isaac's wife?",
        ("Deborah",),
        (
            Fact("Genesis 24:67", "and took Rebekah, and she became his wife;"),
            Fact("Genesis 35:8", "But Deborah Rebekah's nurse died,"),
        ),
    ),
    _ask(
        "How many years did Abraham live?",
        "Genesis 25:7",
        "Abraham's life which he lived, an hundred threescore and fifteen years.",
        "hundred threescore and fifteen",
        number=175,
    ),
    _ask(
        "What did Isaac call the well for which the herdmen of Gerar strove with him?",
        "Genesis 26:20",
        "and he called the name of the well Esek; because they strove with him.",
        "Esek",
    ),
    _ask(
        "What did Reuben find in the field in the days of wheat harvest?",
        "Genesis 30:14",
        "And Reuben went in the days of wheat harvest, and found mandrakes in the field,",
        "mandrakes",
    ),
    _ask(
        "What did Laban call the heap of stones that Jacob called Galeed?",
        "Genesis 31:47",
        "And Laban called it Jegarsahadutha: but Jacob called it Galeed.",
        "Jegarsahadutha",
    ),
    _ask(
        "How many milch camels with their colts were in Jacob's present for Esau?",
        "Genesis 32:15",
        "Thirty milch camels with their colts, forty kine, and ten bulls,",
        "Thirty",
        number=30,
    ),
    _ask(
        "Who found the mules in the wilderness?",
        "Genesis 36:24",
        "this was that Anah that found the mules in the wilderness,",
        "Anah",
    ),
    _ask(
        "What was the name of the Adullamite to whom Judah turned in?",
        "Genesis 38:1",
        "and turned in to a certain Adullamite, whose name was Hirah.",
        "Hirah",
    ),
    _ask(
        "What name did Pharaoh give to Joseph?",
        "Genesis 41:45",
        "And Pharaoh called Joseph's name Zaphnathpaaneah;",
        "Zaphnathpaaneah",
    ),
    _ask(
        "How many pieces of silver did Joseph give to Benjamin?",
        "Genesis 45:22",
        "but to Benjamin he gave three hundred pieces of silver, and five changes of raiment.",
        "three hundred",
        number=300,
    ),
    _ask(
        "How many years did Jacob live in the land of Egypt?",
        "Genesis 47:28",
        "And Jacob lived in the land of Egypt seventeen years:",
        "seventeen",
        number=17,
    ),
    _ask(
        "How many days did the Egyptians mourn for Israel, the father of Joseph?",
        "Genesis 50:3",
        "and the Egyptians mourned for him threescore and ten days.",
        "threescore and ten",
        number=70,
    ),
)

EXODUS = (
    _list(
        "What were the names of the two Hebrew midwives?",
        ("Shiphrah", "Puah"),
        Fact("Exodus 1:15", "the name of the one was Shiphrah, and the name of the other Puah:"),
    ),
    _ask(
        "How many daughters had the priest of Midian?",
        "Exodus 2:16",
        "Now the priest of Midian had seven daughters:",
        "seven",
        number=7,
    ),
    _ask(
        "What was the name of the wife of Amram, who bare him Aaron and Moses?",
        "Exodus 6:20",
        "And Amram took him Jochebed his father's sister to wife;",
        "Jochebed",
    ),
    _list(
        "Which two plants of the field were smitten by the hail?",
        ("flax", "barley"),
        Fact("Exodus 9:31", "And the flax and the barley was smitten:"),
    ),
    _ask(
        "How many years was the sojourning of the children of Israel, who dwelt in Egypt?",
        "Exodus 12:40",
        "who dwelt in Egypt, was four hundred and thirty years.",
        "four hundred and thirty",
        number=430,
    ),
    _ask(
        "How many palm trees were at Elim?",
        "Exodus 15:27",
        "where were twelve wells of water, and threescore and ten palm trees:",
        "threescore and ten",
        number=70,
    ),
    _ask(
        "What was the taste of the manna like?",
        "Exodus 16:31",
        "and the taste of it was like wafers made with honey.",
        "wafers",
    ),
    _list(  # of two facts
        "What were the names of the two sons of Moses' wife Zipporah?",
        ("Gershom", "Eliezer"),
        Fact("Exodus 18:3", "And her two sons; of which the name of the one was Gershom;"),
        Fact("Exodus 18:4", "And the name of the other was Eliezer;"),
    ),
    _ask(
        "How many shekels of silver shall be given to the master if an ox shall push a "
        "manservant or a maidservant?",
        "Exodus 21:32",
        "he shall give unto their master thirty shekels of silver,",
        "thirty",
        number=30,
    ),
    _ask(
        "What will the LORD send to drive out the Hivite, the Canaanite, and the Hittite?",
        "Exodus 23:28",
        "And I will send hornets before thee, which shall drive out the Hivite,",
        "hornets",
    ),
    _list(
        "Which three stones shall be in the second row of the breastplate?",
        ("emerald", "sapphire", "diamond"),
        Fact("Exodus 28:18", "And the second row shall be an emerald, a sapphire, and a diamond."),
    ),
    _ask(
        "How many shekels of pure myrrh were to be taken for the ointment?",
        "Exodus 30:23",
        "principal spices, of pure myrrh five hundred shekels,",
        "five hundred",
        number=500,
    ),
    _ask(
        "About how many men fell on the day on which the children of Levi did according to the "
        "word of Moses?",
        "Exodus 32:28",
        "and there fell of the people that day about three thousand men.",
        "three thousand",
        number=3000,
    ),
    _ask(
        "How many curtains of goats' hair were made for the tent over the tabernacle?",
        "Exodus 36:14",
        "for the tent over the tabernacle: eleven curtains he made them.",
        "eleven",
        number=11,
    ),
    _ask(
        "Of what was the laver of brass made, which belonged to the women assembling at the door?",
        "Exodus 38:8",
        "of the lookingglasses of the women assembling,",
        "lookingglasses",
        "looking glasses",
        "mirrors",
    ),
    _ask(
        "How many men went to be numbered, from twenty years old and upward?",
        "Exodus 38:26",
        "for six hundred thousand and three thousand and five hundred and fifty men.",
        "six hundred thousand and three thousand and five hundred and fifty",
        number=603550,
    ),
    _ask(
        "What was written upon the plate of the holy crown of pure gold?",
        "Exodus 39:30",
        "a writing, like to the engravings of a signet, HOLINESS TO THE LORD.",
        "HOLINESS TO THE LORD",
    ),
)

QUESTIONS = (*GENESIS, *EXODUS)
