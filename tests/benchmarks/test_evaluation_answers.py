"""Which option an answer names, by every usual form and by the benchmarks' official rules; open
answers."""

import pytest

from support.evaluation.answers import (
    choose_option,
    first_letter_by_alphabet,
    first_of_five,
    first_of_four,
    option_in,
    same_answer,
)

COLOURS = ("red", "dark blue", "blue", "A cat")
NUMBERS = ("1", "2", "3", "4")


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", 1),
        ("The correct answer is: (B).", 1),
        ("Answer: B. dark blue, not A. red", 1),
        ("I first thought that the answer is A, but the correct option is D.", 3),
        ("A is wrong <answer> C </answer>", 2),
        ("\\boxed{\\text{D}}", 3),
        ("The car is dark blue.", 1),
        ("a cat", 3),
        ("A is correct", 0),
        ("Answer: A since it is red", 0),
        ("The answer is (c).", 2),
        ("B\n\nA dog is not shown", 1),
        ("我选择B,因为", 1),
        ("（Ｃ）", 2),
        ("It is not B", None),
        ("A or B", None),
        ("", None),
    ],
)
def test_an_answer_names_an_option_in_any_usual_form(text, choice):
    assert choose_option(text, COLOURS) == choice


@pytest.mark.parametrize(
    ("text", "choice"), [("3", 2), ("There are 3.", 2), ("13", None), ("C", 2), ("2 or 3", None)]
)
def test_options_that_are_numbers(text, choice):
    assert choose_option(text, NUMBERS) == choice


def test_an_option_that_is_itself_a_letter():
    """The letter before an option counts, unless prompts do not show letters."""
    assert choose_option("B", ("J", "A", "B")) == 1
    assert option_in("B", ("J", "A", "B")) == 2
    assert choose_option("J", ("J", "A", "B")) == 0


@pytest.mark.parametrize(
    ("text", "vnbench", "videomme", "longvideobench"),
    [
        ("B", 1, 1, 1),
        ("Answer: B", 0, 0, 0),
        ("Best answer: C", 1, 1, 2),
        ("C or A", 0, 2, 2),
        ("no. B", None, 1, 1),
        ("Either B", 1, 1, 4),
        ("E", None, None, 4),
        ("", None, None, None),
    ],
)
def test_the_official_rules(text, vnbench, videomme, longvideobench):
    assert first_letter_by_alphabet(text, NUMBERS) == vnbench
    assert first_of_four(text, NUMBERS) == videomme
    assert first_of_five(text, NUMBERS) == longvideobench


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("X J P", "X J P", True),
        (" x  j p.", "X J P", True),
        ("x,j,p", "X J P", True),
        ("1,000", "1 000", False),
        ("16", "6", False),
        ("-6", "6", False),
        ("(−6)", "-6", True),
        ("3.5", "3,5", False),
        ("?", "!", False),
    ],
)
def test_open_answers(text, expected, same):
    assert same_answer(text, expected) is same
