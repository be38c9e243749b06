"""What Gemma 3 270M learns here: GSM8K in files, and made-up word problems of one to four calculations.

    python -m recipes.gemma3_270m.tasks --data DIR -o runs/gemma3_270m_data      # DIR has GSM8K's train.jsonl and test.jsonl

| file | rows |
|---|---|
| `train.jsonl`, `test.jsonl` | whole questions: `Question: ...\\nAnswer:` and the solution |
| `short.jsonl` | training questions whose solution has one to three calculations, but for those held out |
| `held_out.jsonl` | the last 1,000 training questions, as GSM8K has them: to choose between runs |
| `calls.jsonl`, `test_calls.jsonl` | whole questions whose solutions call `recipes/calculator.py` |
| `gsm8k_test.jsonl` | GSM8K's test set as it is, for `evaluation.sets` |

`stories` is a task (`data.task`): word problems whose names, things and numbers come from a seed. Their solutions are
written as GSM8K's are, `20-5=<<20-5=15>>15`, so a model that has imitated GSM8K solves some of them from the start.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dagrl.data import Example, Splits
from recipes.from_scratch.gsm8k import CALCULATION, Row, final_answer as final_answer, unfinished, with_calls, write_rows

PROMPT = "Question: {}\nAnswer:"
WOMEN = "Ana Beth Clara Dina Emma Grace Hana Iris Julia Mary Nora Rosa Sofia Wendy".split()
MEN = "Adam Ben Carlos David Eric Frank Hugo Ivan James Leo Max Omar Peter Tom".split()
THINGS = (
    "apples balloons beads books buttons cards coins cookies crayons eggs flowers marbles muffins oranges pencils photos "
    "seashells shirts stamps stickers stones tickets toys"
).split()
LARGEST = 999
HELD_OUT = 1000
SHORT = range(1, 4)  # calculations


@dataclass(frozen=True)
class Owner:
    """The person of a story, and what it has."""

    name: str
    they: str
    them: str
    things: str


@dataclass(frozen=True)
class Step:
    """A sentence of a story, its calculation and result, and a line of the solution with `{}` for the calculation."""

    sentence: str
    calculation: str
    result: int
    line: str


Event = Callable[[random.Random, Owner, int], Step]
"""Makes the next step of a story from the number of things so far, which it may take below 1 or above `LARGEST`."""


def gain(draw: random.Random, owner: Owner, count: int) -> Step:
    more = draw.randint(2, 60)
    sentences = (
        f"{owner.they} buys {more} more.",
        f"A friend gives {owner.them} {more} more.",
        f"At home {owner.they.lower()} finds another {more}.",
        f"On the next day {owner.they.lower()} gets {more} new ones.",
    )
    return Step(draw.choice(sentences), f"{count}+{more}", count + more, f"{owner.name} then has {{}} {owner.things}.")


def loss(draw: random.Random, owner: Owner, count: int) -> Step:
    fewer = draw.randint(1, max(1, count - 1))
    sentences = (
        f"{owner.they} gives {fewer} of them to a neighbor.",
        f"{owner.they} loses {fewer} of them on the way.",
        f"{owner.they} sells {fewer} of them at the market.",
        f"{fewer} of them are damaged and thrown away.",
    )
    return Step(draw.choice(sentences), f"{count}-{fewer}", count - fewer, f"{owner.name} has {{}} {owner.things} left.")


def growth(draw: random.Random, owner: Owner, count: int) -> Step:
    factor, word = draw.choice(((2, "doubles"), (3, "triples")))
    sentence = f"By the end of the month the number of {owner.things} {word}."
    return Step(sentence, f"{count}*{factor}", count * factor, f"{owner.name} now has {{}} {owner.things}.")


def part(draw: random.Random, owner: Owner, count: int) -> Step:
    divisor, word = draw.choice(((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth")))
    if count % divisor:
        return loss(draw, owner, count)
    sentence = f"{owner.they} keeps {word} of the {owner.things} and gives all others away."
    return Step(sentence, f"{count}/{divisor}", count // divisor, f"{owner.name} keeps {{}} {owner.things}.")


def sale(draw: random.Random, owner: Owner, count: int) -> Step:
    price = draw.randint(2, 9)
    told, asked = f"{owner.they} sells all of the {owner.things} for ${price} each.", f"does {owner.they.lower()} get?"
    return Step(f"{told} How many dollars {asked}", f"{count}*{price}", count * price, f"{owner.name} gets ${{}}.")


def packing(draw: random.Random, owner: Owner, count: int) -> Step:
    sizes = [size for size in range(2, 13) if count % size == 0 and count > size]
    if not sizes:
        return sale(draw, owner, count)
    size = draw.choice(sizes)
    told, asked = f"{owner.they} packs all of the {owner.things} into bags of {size}.", f"does {owner.they.lower()} fill?"
    return Step(f"{told} How many bags {asked}", f"{count}/{size}", count // size, f"{owner.name} fills {{}} bags.")


EVENTS: tuple[Event, ...] = (gain, gain, loss, loss, growth, part)
ENDS: tuple[Event, ...] = (sale, packing)


def story(draw: random.Random, steps: int) -> Row | None:
    """Returns a problem with `steps` calculations and its solution; None if a number left its range."""
    woman = draw.random() < 0.5
    they, them = ("She", "her") if woman else ("He", "him")
    owner = Owner(draw.choice(WOMEN if woman else MEN), they, them, draw.choice(THINGS))
    count = draw.randint(5, 80)
    text, lines = [f"{owner.name} has {count} {owner.things}."], list[str]()
    asks = draw.random() < 0.5  # the last step is the question
    for number in range(1, steps + 1):
        make = draw.choice(ENDS if asks and number == steps else EVENTS)
        step = make(draw, owner, count)
        if not 1 <= step.result <= LARGEST:
            return None
        count = step.result
        text.append(step.sentence)
        lines.append(step.line.format(f"{step.calculation}=<<{step.calculation}={count}>>{count}"))
    if not asks:
        text.append(f"How many {owner.things} does {owner.name} have now?")
    return {"prompt": PROMPT.format(" ".join(text)), "response": " " + "\n".join([*lines, f"#### {count}"])}


def stories(steps: int = 2, count: int = 4000, held_out: int = 256, seed: int = 0) -> Splits:
    """Makes `count` problems of `steps` calculations to train on, and `held_out` others for validation."""
    if steps < 1 or held_out < 1 or count < 1:
        raise ValueError(f"steps, count and held_out are {steps}, {count} and {held_out}; expected: at least 1 each")
    draw = random.Random(f"{seed} {steps}")  # noqa: S311  # not cryptography
    rows: dict[str, Example] = {}
    while len(rows) < count + held_out:
        if row := story(draw, steps):
            rows[row["prompt"]] = Example(row["prompt"], row["response"], source=f"story {len(rows)} of {steps} steps")
    examples = tuple(rows.values())
    return Splits(examples[held_out:], examples[held_out:], examples[:held_out])


def prepare(data: Path, output: Path) -> None:
    """Writes all files of the module's table into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / "test.jsonl", output / "gsm8k_test.jsonl")
    lines = {source: (data / f"{source}.jsonl").read_text(encoding="utf-8").splitlines() for source in ("train", "test")}
    (output / "held_out.jsonl").write_text("\n".join(lines["train"][-HELD_OUT:]) + "\n", encoding="utf-8")
    rest = map(json.loads, lines["train"][:-HELD_OUT])
    short = (problem for problem in rest if len(CALCULATION.findall(problem["answer"])) in SHORT)
    write_rows(output / "short.jsonl", (row for problem in short for row in unfinished(problem, None)))
    for source, prefix in (("train", ""), ("test", "test_")):
        problems = [json.loads(line) for line in lines[source]]
        called = map(with_calls, problems)
        for name, chosen in ((source, problems), (f"{prefix}calls", called)):
            write_rows(output / f"{name}.jsonl", (row for problem in chosen for row in unfinished(problem, None)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a directory with GSM8K's JSONL files")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the directory to write")
    options = parser.parse_args()
    prepare(options.data, options.output)
