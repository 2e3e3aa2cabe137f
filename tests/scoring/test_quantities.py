r"""Quantities as people write them, math-verify as the oracle of numbers, and the tolerance."""

import decimal
from fractions import Fraction

import math_verify
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.scoring.extraction import Malformed
from notepad_jax.scoring.quantities import number, numeric, read

RIGHT = [
    ("42", "42"),
    (" 42.\n", "42"),
    ("+42", "42"),
    ("-0", "0"),
    ("\u221242", "-42"),
    ("４２", "42"),
    ("42.0", "42"),
    (".5", "0.50"),
    ("1,234,567", "1234567"),
    (r"1{,}234", "1234"),
    ("1\u202f234", "1234"),
    ("1.5e3", "1500"),
    (r"6.02 \times 10^{23}", "6.02e23"),
    ("6.02 × 10^23", "6.02e23"),
    ("6.02*10**23", "6.02e23"),
    ("3/4", "0.75"),
    (r"\frac{3}{4}", "0.75"),
    (r"-\dfrac{3}{4}", "-0.75"),
    ("1 3/4", "1.75"),
    (r"1\frac{3}{4}", "7/4"),
    ("50%", "0.5"),
    ("50", "50%"),
    (r"50\%", "50 percent"),
    ("3.2 million", "3200000"),
    ("$5", "5"),
    (r"\$5", "5 €"),
    ("5 km", "5"),
    ("5", "5 km"),
    ("5km", "5 km"),
    (r"5\,\text{km}", "5 KM"),
    ("5 apples", "5 apple"),
    ("20°C", "20 °C"),
    ("9.81 m/s^2", "9.81 m/s^2"),
    ("**42**", "42"),
    ("$42$", "42"),
    (r"\(42\)", "42"),
    ("x = 42", "42"),
    ("x = 6 * 7 = 42", "42"),
    ("1,000 + 234 = 1,234", "1234"),
    ("The answer is 42.", "42"),
    ("Answer: 42", "42"),
    ("6 times 7\nis\n42", "42"),
    ("0.33333333", "1/3"),
    ("12345678901234567890", "12345678901234567890"),
    ("twelve", "twelve"),  # no number, yet the very words
]
WRONG = [
    ("43", "42"),
    ("-42", "42"),
    ("1234568", "1234567"),  # integers are exact, though these differ by less than a millionth
    ("9007199254740993", "9007199254740992"),  # equal as floats
    ("0.33", "1/3"),
    ("1,23", "123"),
    ("5 km", "5 miles"),
    ("5%", "0.5"),
    ("500%", "5%"),
    ("3.2 million", "3.2"),
    ("1e-7", "0"),
    ("x <= 5", "5"),
    ("x != 5", "5"),
    ("x = 3, y = 4", "x = 1, y = 4"),
    ("x = 3 or x = 4", "4"),
    ("1/0", "0"),
    ("1e400", "1e401"),
]


@pytest.mark.parametrize(("said", "gold"), RIGHT)
def test_right(said, gold):
    assert numeric(said, [gold]) == numeric(said, ["-7", gold]) == 1.0
    assert numeric(gold, [said]) == 1.0


@pytest.mark.parametrize(("said", "gold"), WRONG)
def test_wrong(said, gold):
    assert numeric(said, [gold]) == 0.0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "no_number"),
        ("forty-two", "no_number"),
        ("I counted 42 of them in 7 rows", "no_number"),
        ("3 or perhaps 4", "no_number"),
        ("=cz\U0007860d", "no_number"),
        ("9" * 301, "too_long"),
        ("{" * 300, "no_number"),
    ],
)
def test_what_is_no_quantity(said, reason):
    with pytest.raises(Malformed, match=reason):
        numeric(said, ["42"])


@pytest.mark.parametrize(
    "said",
    ["5x", "5 x", "5 - x", "5/x", "5^2", "5 pi", "x <= 5", "x = 3, y = 5", "5\\sqrt{2}", "5i"],
)
def test_formulas_are_not_taken_for_numbers_with_a_unit(said):
    assert read(said) is None


def test_the_tolerance_is_a_millionth_of_the_gold_answer():
    for gold in ("1000.0", "-0.001", "2/3"):
        exact = read(gold).value
        for factor, right in ((1 + Fraction(1, 10**6), 1), (1 + Fraction(11, 10**7), 0)):
            said = exact * factor
            assert (
                numeric(f"{said.numerator}/{said.denominator}".replace("-", "- "), [gold]) == right
            )


def test_number_reads_bare_numbers_only():
    assert number("-1,234.50") == Fraction(-2469, 2)
    assert number("1e3") == 1000 and number("1E-3") == Fraction(1, 1000)
    for text in ("", "-", ".", "5 km", "50%", "1/2", "1e999", "--5", "9" * 301, "1,23", "0x10"):
        assert number(text) is None


@given(st.fractions(max_denominator=10**6), st.integers(-20, 20))
def test_every_spelling_of_a_number_is_that_number(value, shift):
    spelled = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)  # 28 digits
    for said in (
        str(spelled),
        f"{spelled:e}",
        f"{spelled:,f}",
        f"{spelled * 100:f}%",
        f"$ {spelled:f}$",
    ):
        assert numeric(said, [f"{value.numerator}/{value.denominator}"]) == 1.0
    assert numeric(f"{value.numerator}/{value.denominator}", [f"{spelled:f}"]) == 1.0
    if value:
        said = f"{value.numerator}e{shift}"
        right = float(shift == 0)
        assert numeric(said, [f"{value.numerator}"]) == right


@pytest.mark.parametrize("gold", ["3", "-3", "0.5", "1/2", "2/3", "100", "50%"])
@pytest.mark.parametrize(
    "said", ["3", "3.0", "-3", "1/2", "0.5", "50%", r"\frac{2}{3}", "100", "1,000", "0.05", r"50\%"]
)
def test_numbers_agree_with_math_verify(said, gold):
    ours = numeric(said, [gold])
    oracle = math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(f"${said}$"))
    if (said, gold) == ("0.5", "50%") or (said, gold) == ("1/2", "50%"):
        assert ours == 1.0  # either reading of a one-sided percent sign
    else:
        assert ours == float(oracle)


@given(st.text(), st.lists(st.text(), min_size=1, max_size=2))
def test_any_text_is_judged(said, golds):
    try:
        assert numeric(said, golds) in (0.0, 1.0)
    except Malformed as malformed:
        assert malformed.reason in {"no_number", "too_long", "unreadable_formula", "too_hard"}


@pytest.mark.parametrize("said", ["The total is **470** sacks.", r"\texttt{470}", "470 crowns"])
def test_decoration_and_units_of_one_side_are_no_part_of_a_number(said):
    assert numeric(said, ["470"]) == 1.0
