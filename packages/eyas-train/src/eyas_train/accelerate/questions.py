"""Questions that a target is asked when the user brings none: every form with every subject that
suits it, in an order that mixes them.

They are plain English, of the kinds that people ask a chat model. A head drafts best for texts like those it
was trained on, so your own questions are better. This module knows no model and no file.
"""

from __future__ import annotations

import random
from typing import NamedTuple


class _Kind(NamedTuple):
    """Questions of one kind: each form takes each subject at its `{}`."""

    forms: tuple[str, ...]
    subjects: tuple[str, ...]


_EXPLAIN = _Kind(
    (
        "What is {}?",
        "Explain {} to a child of ten.",
        "Write a short paragraph about {}.",
        "Tell me three facts about {} and why each one matters.",
        "What do people often get wrong about {}?",
        "I have an exam about {} tomorrow. What should I know?",
        "Give me an example from daily life that shows {}.",
        "Why does {} matter?",
    ),
    (
        "photosynthesis", "compound interest", "the water cycle", "gravity", "inflation", "the immune system",
        "plate tectonics", "natural selection", "supply and demand", "the greenhouse effect", "electricity",
        "the Roman Empire", "the printing press", "democracy", "the human heart", "friction", "antibiotics",
        "the solar system", "probability", "nuclear power", "the Industrial Revolution", "bees and pollination",
        "machine learning", "encryption", "the food chain", "sleep", "the stock market", "recycling", "vaccines",
        "the speed of light", "volcanoes", "the Silk Road", "fermentation", "insurance", "the ozone layer", "DNA",
    ),
)  # fmt: skip
_DO = _Kind(
    (
        "How do I {}?",
        "Give me instructions, step by step, to {}.",
        "I have never tried to {}. Where should I begin?",
        "What do I need before I {}?",
        "What goes wrong most often when people {}?",
        "Is it hard to {}, and how long does it take?",
    ),
    (
        "bake a loaf of bread", "change a flat tire", "prepare for a job interview", "learn to swim as an adult",
        "plan a trip to the mountains", "grow tomatoes on a balcony", "save money for a house", "write a cover letter",
        "fix a dripping tap", "train for a run of ten kilometers", "learn a new language", "paint a bedroom wall",
        "organize a birthday party", "move to another city", "look after a puppy", "give a speech at a wedding",
        "make a budget for a month", "clean a laptop keyboard", "choose a used car", "start a small garden",
        "cook rice without burning it", "quit drinking so much coffee", "remember people's names", "pack a suitcase",
        "start a book club", "negotiate a higher salary", "back up the photos on my phone", "make new friends",
        "brew good coffee at home", "read more books in a year", "repair a bicycle chain", "host a dinner for six",
    ),
)  # fmt: skip
_WRITE = _Kind(
    (
        "Write a short story about {}.",
        "Write a poem of eight lines about {}.",
        "Write a dialogue between two friends about {}.",
        "Write a friendly email in which somebody tells a colleague about {}.",
        "Write the first paragraph of a novel about {}.",
        "Make a list of five titles for a film about {}, each with one sentence about the plot.",
    ),
    (
        "a lost dog that finds its way home", "an old lighthouse", "the last day of school", "a train that never stops",
        "a robot that learns to paint", "two brothers who open a bakery", "a letter that arrives thirty years late",
        "a storm at sea", "a garden on the moon", "a quiet neighbor with a secret", "the first snow of winter",
        "a musician who loses her hearing", "a map with a missing corner", "a grandmother who teaches chess",
        "a city without cars", "a stolen bicycle", "a long walk in the desert", "a library at night",
    ),
)  # fmt: skip
_CODE = _Kind(
    (
        "Write a Python function that {}.",
        "Write a function in JavaScript that {}, and explain each line.",
        "How would you test a function that {}?",
    ),
    (
        "reverses the words of a sentence", "counts the vowels in a text", "finds the two largest numbers of a list",
        "checks whether a word is a palindrome", "removes duplicates from a list and keeps the order",
        "converts degrees Celsius to Fahrenheit", "groups words by their first letter", "merges two sorted lists",
        "reads a file and returns its longest line", "adds up the digits of a number", "checks a password for length",
        "returns the prime numbers below a limit", "turns seconds into hours, minutes and seconds",
        "sorts a list of people by age", "rotates a square matrix by ninety degrees", "counts words in a text file",
        "finds the most common letter in a text", "splits a list into pieces of equal length",
    ),
)  # fmt: skip
_DECIDE = _Kind(
    (
        "Should I choose {}? Compare them.",
        "What are the advantages and disadvantages of {}?",
        "Make a table that compares {}.",
        "My family cannot agree on {}. Help us to decide.",
    ),
    (
        "a cat or a dog", "a flat in the city or a house in the country", "trains or planes for a holiday",
        "tea or coffee in the morning", "a laptop or a tablet for college", "cooking at home or eating out",
        "an electric car or a petrol car", "working at home or in an office", "paper books or electronic books",
        "a beach holiday or a skiing holiday", "renting or buying a home", "public or private schools",
        "running or cycling", "a small wedding or a big one", "night shifts or early shifts",
    ),
)  # fmt: skip
_ASK_FOR = _Kind(
    (
        "I would like to book {}. What do you need to know?",
        "I want to cancel {} that I booked last week. Write the message for me.",
        "Help me to find {} for this weekend.",
        "I was not happy with {}. Write a polite complaint.",
    ),
    (
        "a table for four at a seafood restaurant", "a hotel room near the airport", "two tickets for a concert",
        "a haircut", "a rental car for three days", "a guided tour of the old town", "a bus from Oakland to Fresno",
        "an appointment with a dentist", "a room for a meeting of ten people", "a yoga class", "a flight to Denver",
        "a moving van", "a cooking course for beginners", "a photographer for a family party",
    ),
)  # fmt: skip
_COUNT = _Kind(
    ("{} Show your work.", "{} Explain how you found the answer.", "{}"),
    (
        "A box holds 12 eggs. How many eggs are in 7 boxes, if 5 of them are broken?",
        "A train leaves at 9:40 and arrives at 13:15. How long is the journey?",
        "Tom reads 24 pages a day. How many days does he need for a book of 312 pages?",
        "A shirt costs $40 and is reduced by 15 percent. What does it cost now?",
        "Three friends share a bill of $87 and add a tip of $9. What does each of them pay?",
        "A garden is 18 meters long and 7 meters wide. How much fence goes around it?",
        "A car uses 6 liters for 100 kilometers. How much does it use for 450 kilometers?",
        "Anna earns $18 an hour and works 6 hours a day, 4 days a week. What does she earn in 3 weeks?",
        "A tank of 240 liters loses 4 liters an hour. After how many hours is it half empty?",
        "There are 28 pupils in a class, and three quarters of them play a sport. How many do not?",
        "A recipe for 4 people needs 300 grams of flour. How much do 10 people need?",
        "A phone costs $25 a month for 24 months, or $540 at once. Which is cheaper, and by how much?",
    ),
)
_KINDS = (_EXPLAIN, _DO, _WRITE, _CODE, _DECIDE, _ASK_FOR, _COUNT)


def questions() -> list[str]:
    """Return all questions, mixed: the first hundred have some of every kind."""
    every = [form.format(subject) for kind in _KINDS for subject in kind.subjects for form in kind.forms]
    random.Random(0).shuffle(every)
    return every
