"""Generates word problems in GSM8K's format, from one sum of small numbers (level 1) to five steps (level 5).

Row i depends on (seed, level, split, i) alone, never on how many rows are asked for. The trap: independent draws would
repeat rows and leak between splits. So the visible beginning of a problem (template, name, first number) is numbered;
a fixed fifth of the numbers belongs to "test", for every seed, and rows walk through their split's numbers in shuffled
order. Rows are distinct until a split's numbers are used up (2,457 test and 9,831 train rows at level 1, more above).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from ratchet.errors import DataError

LEVELS = (1, 2, 3, 4, 5)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_GIRLS = _words(
    "Ada Amy Anna Bella Chloe Clara Diana Ella Emma Eva Fiona Grace Hana Iris Jane Julia Kate Lea Lily Lucy Maria Maya "
    "Mia Nina Nora Olga Paula Rosa Sara Tina Vera Zoe"
)
_BOYS = _words(
    "Adam Alan Ben Boris Carl Dan David Eli Eric Felix Finn George Hugo Ivan Jack James John Karl Leo Liam Luke Mark "
    "Max Milo Noah Omar Oscar Paul Peter Sam Tom Victor"
)
_NAMES = (*_GIRLS, *_BOYS)
_ITEMS = _words(
    "marbles stickers pencils shells coins buttons cards stamps books apples oranges lemons cookies candies balloons "
    "flowers stones beads crayons plums nuts toys bottles tickets"
)

# (story, question, how the answer goes on behind the sum); the sign says which sum.
_LEVEL_1: tuple[tuple[str, str, str, str], ...] = (
    ("+", "{name} has {a} {items}. {name} gets {b} more.", "How many {items} does {name} have now?", "{items}"),
    ("+", "{a} {items} are in {name}'s box. {name} puts in {b} more.", "How many are in the box now?", "{items}"),
    ("+", "{name} reads {a} pages today and {b} pages tomorrow.", "How many pages is that in all?", "pages"),
    ("+", "{name} finds {a} {items}. {friend} finds {b} {items}.", "How many do they find together?", "{items}"),
    ("+", "{name} saves ${a} and then earns ${b}.", "How many dollars does {name} have?", "dollars"),
    ("+", "{name} walks {a} miles on Monday and {b} miles on Tuesday.", "How many miles is that in all?", "miles"),
    ("+", "{name} bakes {a} small cakes and {b} big cakes.", "How many cakes does {name} bake?", "cakes"),
    ("+", "{name} sees {a} birds in a tree. Then {b} more birds come.", "How many birds are in the tree?", "birds"),
    ("-", "{name} has {a} {items}. {name} gives {b} to {friend}.", "How many {items} are left?", "{items}"),
    ("-", "{name} has ${a} and spends ${b}.", "How many dollars are left?", "dollars"),
    ("-", "{name} rides a bus with {a} people. {b} people get off.", "How many people are still on it?", "people"),
    ("-", "{name} buys {a} eggs. {b} of the eggs break.", "How many eggs are not broken?", "eggs"),
    ("-", "{name}'s book has {a} pages. {name} has read {b} of them.", "How many pages are left?", "pages"),
    ("-", "{name} has {a} balloons. {b} balloons fly away.", "How many balloons are left?", "balloons"),
    ("-", "{name} is {a} years old. {friend} is {b} years younger.", "How old is {friend}?", "years"),
    ("-", "{name} needs {a} points and has {b} points.", "How many more points does {name} need?", "points"),
)

_OPENINGS = (
    "{name} has {a} {items}.",
    "{name} starts the week with {a} {items}.",
    "There are {a} {items} on {name}'s shelf.",
    "{name} owns {a} {items}.",
    "For {his} birthday {name} is given {a} {items}.",
    "{name} keeps {a} {items} in a jar.",
    "{name} packs {a} {items} in a bag.",
    "In {name}'s room there are {a} {items}.",
    "{name} counts {a} {items} of {his} own.",
    "Last year {name} collected {a} {items}.",
    "{name} brings {a} {items} to school.",
    "{name}'s aunt gives {him} {a} {items}.",
)
_NUM_FIRST = {1: 12, 2: 18, 3: 24, 4: 36, 5: 48}
"""How many first numbers a level has; none is a multiple of 5, or a split would own some of the first numbers."""
_LARGEST = {2: 12, 3: 20, 4: 40, 5: 60}
_NUM_STEPS = {2: (2, 2), 3: (3, 3), 4: (3, 4), 5: (4, 5)}


@dataclass(slots=True)
class _Story:
    """A problem under construction: `count` is what the hero holds after the sentences so far."""

    random: Random
    words: dict[str, str]
    largest: int
    count: int
    sentences: list[str]
    steps: list[str]

    def say(self, *choices: str, **numbers: int) -> None:
        self.sentences.append(self.random.choice(choices).format(**self.words, **numbers))

    def compute(self, template: str, expression: str, result: int) -> None:
        """Add a solution line; `{sum}` is the expression with its annotated result."""
        spaced = expression
        for operator in "+-*/":
            spaced = spaced.replace(operator, f" {operator} ")
        self.steps.append(template.format(**self.words, sum=f"{spaced} = <<{expression}={result}>>{result}"))

    def change(self, expression: str, result: int) -> None:
        self.compute("{name} now has {sum} {items}.", expression, result)
        self.count = result


def _gain(story: _Story) -> bool:
    more = story.random.randint(2, story.largest)
    story.say("{name} finds {b} more {items}.", "{friend} gives {him} {b} {items}.", "Then {he} buys {b} more.", b=more)
    story.change(f"{story.count}+{more}", story.count + more)
    return True


def _lose(story: _Story) -> bool:
    if story.count < 4:
        return False
    fewer = story.random.randint(2, min(story.largest, story.count - 1))
    story.say("{name} gives {b} of them to {friend}.", "{He} loses {b} of them.", "Then {he} sells {b}.", b=fewer)
    story.change(f"{story.count}-{fewer}", story.count - fewer)
    return True


def _double(story: _Story) -> bool:
    if story.count > 400:
        return False
    story.say("Then {name} gets as many again as {he} has.", "A week later {he} has twice as many.")
    story.change(f"{story.count}*2", story.count * 2)
    return True


def _halve(story: _Story) -> bool:
    if story.count % 2 or story.count < 4:
        return False
    story.say("{name} gives half of them to {friend}.", "Then {he} puts half of them away for good.")
    story.change(f"{story.count}/2", story.count // 2)
    return True


def _share(story: _Story) -> bool:
    divisors = [k for k in range(3, 10) if story.count % k == 0 and story.count >= 2 * k]
    if not divisors:
        return False
    shares = story.random.choice(divisors)
    story.say("{name} makes {k} equal piles of them and keeps only one pile.", k=shares)
    story.change(f"{story.count}/{shares}", story.count // shares)
    return True


def _packs(story: _Story) -> bool:
    packs, each = story.random.randint(2, 6), story.random.randint(2, 12)
    story.say(
        "{name} buys {k} packs with {m} {items} each.",
        "{He} wins {k} bags with {m} {items} each.",
        k=packs,
        m=each,
    )
    story.compute("The new ones are {sum} {items}.", f"{packs}*{each}", packs * each)
    story.change(f"{story.count}+{packs * each}", story.count + packs * each)
    return True


def _daily(story: _Story) -> bool:
    days, each = story.random.randint(2, 5), story.random.randint(2, 9)
    if days * each >= story.count:
        return False
    story.say("Each day for {k} days {he} gives {m} of them away.", k=days, m=each)
    story.compute("{name} gives away {sum} {items}.", f"{days}*{each}", days * each)
    story.change(f"{story.count}-{days * each}", story.count - days * each)
    return True


def _percent(story: _Story) -> bool:
    shares = [share for share in (10, 20, 25, 50, 75) if story.count * share % 100 == 0]
    if not shares or story.count < 4:
        return False
    share = story.random.choice(shares)
    part = story.count * share // 100
    story.say("Then {name} sells {k}% of them.", k=share)
    story.compute("{name} sells {sum} {items}.", f"{story.count}*{share}/100", part)
    story.change(f"{story.count}-{part}", story.count - part)
    return True


_Event = Callable[[_Story], bool]
_ONE_STEP: tuple[_Event, ...] = (_gain, _lose, _double, _halve, _share)
_TWO_STEPS: tuple[_Event, ...] = (_packs, _daily, _percent)


def _level_1(random: Random, template: int, words: dict[str, str], first: int) -> dict[str, str]:
    sign, story, question, unit = _LEVEL_1[template]
    second = random.randint(2, 9) if sign == "+" else random.randint(2, first - 1)
    result = first + second if sign == "+" else first - second
    text = f"{story} {question}".format(**words, a=first, b=second)
    line = f"{first} {sign} {second} = <<{first}{sign}{second}={result}>>{result} {unit.format(**words)}."
    return {"question": text, "answer": f"{line}\n#### {result}"}


def _story_problem(random: Random, level: int, opening: int, words: dict[str, str], first: int) -> dict[str, str]:
    sentences = [_OPENINGS[opening].format(**words, a=first)]
    story = _Story(random, words, _LARGEST[level], first, sentences, [])
    target = random.randint(*_NUM_STEPS[level])
    while len(story.steps) < target:
        is_long = target - len(story.steps) >= 2 and random.random() < 0.5
        events = (_TWO_STEPS if level >= 4 else _TWO_STEPS[:-1]) if is_long else _ONE_STEP
        # Gaining is always possible, so the loop ends.
        random.choice(events)(story)
        if len(story.steps) == target - 1 and level >= 3 and random.random() < 0.3:
            price = random.randint(2, 9)
            story.say("{name} sells all that {he} has left for ${p} each.", p=price)
            earned = story.count * price
            story.compute("{name} earns ${sum}.", f"{story.count}*{price}", earned)
            return _finish(story, "How many dollars does {name} earn?", earned)
    question = "How many {items} does {name} have " + random.choice(("now?", "in the end?", "left at last?"))
    return _finish(story, question, story.count)


def _finish(story: _Story, question: str, result: int) -> dict[str, str]:
    text = " ".join([*story.sentences, question.format(**story.words)])
    return {"question": text, "answer": "\n".join([*story.steps, f"#### {result}"])}


def _num_templates(level: int) -> int:
    return len(_LEVEL_1) if level == 1 else len(_OPENINGS)


@lru_cache(maxsize=16)
def _beginnings(seed: int, level: int, split: str) -> tuple[int, ...]:
    """The numbers of the beginnings that belong to `split`, in this seed's order."""
    space = range(_num_templates(level) * len(_NAMES) * _NUM_FIRST[level])
    order = [number for number in space if (number % 5 == 4) == (split == "test")]
    Random(f"{seed}/{level}/{split}").shuffle(order)
    return tuple(order)


def problem(seed: int, level: int, split: str, index: int) -> dict[str, str]:
    """Row `index` as {"question", "answer"}; every step is annotated <<a+b=c>>, the last line is "#### c"."""
    if level not in LEVELS:
        raise DataError(f"word problems: expected a level from 1 to 5, got {level}")
    if split not in ("train", "test"):
        raise DataError(f"word problems: expected the split train or test, got {split!r}")
    beginnings = _beginnings(seed, level, split)
    rest, offset = divmod(beginnings[index % len(beginnings)], _NUM_FIRST[level])
    template, person = divmod(rest, len(_NAMES))
    random = Random(f"{seed}/{level}/{split}/{index}")
    name = _NAMES[person]
    he, him, his = ("she", "her", "her") if name in _GIRLS else ("he", "him", "his")
    friend = random.choice([other for other in _NAMES if other != name])
    words = {"name": name, "friend": friend, "items": random.choice(_ITEMS), "he": he, "him": him, "his": his}
    words["He"] = he.capitalize()
    first = offset + 3 if level == 1 else 2 * offset + 6
    if level == 1:
        return _level_1(random, template, words, first)
    return _story_problem(random, level, template, words, first)


def generate(*, level: int, size: int, seed: int, split: str, rejected: int = 0) -> list[dict[str, str]]:
    """The first `size` rows of a set; train and test never share a problem, whatever the seeds.

    `rejected=1` adds a third column to each: the answer with a wrong result, in its last step and behind "####".
    """
    if size < 1:
        raise DataError(f"word problems: expected a size of at least 1, got {size}")
    if rejected not in (0, 1):
        raise DataError(f"word problems: expected rejected=1 or 0, got {rejected}")
    rows = [problem(seed, level, split, index) for index in range(size)]
    if not rejected:
        return rows
    randoms = (Random(f"{seed}/{level}/{split}/{index}/rejected") for index in range(size))
    return [{**row, "rejected": _miscounted(row["answer"], random)} for row, random in zip(rows, randoms, strict=True)]


def _miscounted(answer: str, random: Random) -> str:
    steps, _, result = answer.rpartition("\n#### ")
    *before, last = steps.split("\n")
    wrong = str(int(result) + random.randint(1, 9))
    # Where the result is annotated, and said again: "<<3+4=7>>7".
    last = last.replace(f"={result}>>{result}", f"={wrong}>>{wrong}")
    return "\n".join([*before, last, f"#### {wrong}"])
