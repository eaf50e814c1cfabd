"""The tasks the bundled model is trained on, as questions with answers that can be checked.

Purely text: no tokenizer, no tensors, nothing but the standard library. The training code draws examples here, and the
demo and the quality benchmark ask the held-out questions of the same tasks.

Every question has a canonical input (`Example.key`), equal for questions that ask the same thing: a + b and b + a, a
Sudoku and the same Sudoku with its digits renamed. A stable hash of it decides on which side of the split the question
lies, so no held-out question is ever trained on, in whatever order and with whatever seed the examples are drawn.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 1 / 8


@dataclass(frozen=True)
class Example:
    """One question: what is asked, the answer to train on, and every answer that counts as right."""

    task: str
    prompt: str
    answer: str
    accepted: frozenset[str]
    key: str


@dataclass(frozen=True)
class Task:
    """A kind of question.

    `draw` makes a random one. Its second argument says for which side of the split: a task may ask easier or
    differently worded questions when training; most ignore it and leave the choice to the hash of the key.
    """

    name: str
    title: str
    draw: Callable[[random.Random, bool], Example]


def is_held_out(task: str, key: str) -> bool:
    """Whether the question with this canonical input belongs to the held-out side of the split."""
    digest = hashlib.sha256(f"{task}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def training_example(rng: random.Random, task: str) -> Example:
    """A random question of the training side; `rng` alone decides which."""
    while True:
        example = TASKS[task].draw(rng, False)
        if not _on_held_out_side(example):
            return example


def held_out(task: str, count: int, seed: int = 0) -> list[Example]:
    """`count` different questions of the held-out side, the same ones for the same seed.

    Raises ValueError when the task has fewer than that.
    """
    rng = random.Random(f"held out/{task}/{seed}")
    found: dict[str, Example] = {}
    barren = 0  # draws since the last new question
    while len(found) < count:
        example = TASKS[task].draw(rng, True)
        barren += 1
        if _on_held_out_side(example) and example.prompt not in found:
            found[example.prompt] = example
            barren = 0
        if barren > 1000 + 50 * len(found):
            raise ValueError(f"task {task!r} has only {len(found)} held-out questions, {count} were asked for")
    return list(found.values())


def check(example: Example, text: str) -> bool:
    """Whether `text` is a right answer; white space around it and at line ends does not count."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) in example.accepted


def _on_held_out_side(example: Example) -> bool:
    if example.task == "facts":  # the split is by wording: the key says which
        return example.key.startswith("held out/")
    return is_held_out(example.task, example.key)


def _example(task: str, prompt: str, answer: str, key: str, accepted: list[str] | None = None) -> Example:
    return Example(task, prompt, answer, frozenset(accepted or [answer]), key)


# Sudoku ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """A Sudoku shape: `size` rows and columns, boxes of `box_rows` x `box_columns`, how many cells may be blank."""

    size: int
    box_rows: int
    box_columns: int
    blanks: tuple[int, int]

    def groups(self, cell: int) -> tuple[int, int, int]:
        """Row, column and box number of a cell."""
        row, column = divmod(cell, self.size)
        boxes_across = self.size // self.box_columns
        return row, column, row // self.box_rows * boxes_across + column // self.box_columns


GRIDS = {"sudoku4": _Grid(4, 2, 2, (4, 10)), "sudoku6": _Grid(6, 2, 3, (6, 20))}


def _solutions(grid: _Grid, cells: list[int], limit: int, rng: random.Random | None = None) -> list[list[int]]:
    """Up to `limit` completions of `cells` (0 for a blank), in random order of digits when `rng` is given."""
    rows, columns, boxes = [0] * grid.size, [0] * grid.size, [0] * grid.size
    where = [grid.groups(cell) for cell in range(len(cells))]
    for cell, digit in enumerate(cells):
        if digit:
            row, column, box = where[cell]
            rows[row] |= 1 << digit
            columns[column] |= 1 << digit
            boxes[box] |= 1 << digit
    digits = list(range(1, grid.size + 1))
    cells = list(cells)
    blanks = [cell for cell, digit in enumerate(cells) if not digit]
    found: list[list[int]] = []

    def fill() -> None:
        if not blanks:
            found.append(list(cells))
            return
        best, best_taken = -1, -1  # the blank with the fewest digits left
        for index, cell in enumerate(blanks):
            row, column, box = where[cell]
            taken = (rows[row] | columns[column] | boxes[box]).bit_count()
            if taken > best_taken:
                best, best_taken = index, taken
                if taken >= grid.size - 1:
                    break
        cell = blanks[best]
        blanks[best] = blanks[-1]
        blanks.pop()
        row, column, box = where[cell]
        for digit in digits if rng is None else rng.sample(digits, grid.size):
            bit = 1 << digit
            if (rows[row] | columns[column] | boxes[box]) & bit:
                continue
            cells[cell] = digit
            rows[row] |= bit
            columns[column] |= bit
            boxes[box] |= bit
            fill()
            rows[row] ^= bit
            columns[column] ^= bit
            boxes[box] ^= bit
            if len(found) >= limit:
                break
        cells[cell] = 0
        blanks.append(cell)
        blanks[best], blanks[-1] = blanks[-1], blanks[best]

    fill()
    return found


def _lines(grid: _Grid, cells: list[int]) -> str:
    text = "".join(str(digit) if digit else "_" for digit in cells)
    return "\n".join(text[start : start + grid.size] for start in range(0, len(text), grid.size))


def _renamed(cells: list[int]) -> str:
    """The cells with digits renamed in order of appearance: equal for Sudokus that differ only by names of digits."""
    names: dict[int, int] = {0: 0}
    return "".join(str(names.setdefault(digit, len(names))) for digit in cells)


def _draw_sudoku(task: str) -> Callable[[random.Random, bool], Example]:
    grid = GRIDS[task]

    def draw(rng: random.Random, held: bool) -> Example:
        area = grid.size * grid.size
        solution = _shuffled(grid, _solutions(grid, [0] * area, 1, rng)[0], rng)
        cells = list(solution)
        for cell in rng.sample(range(area), rng.randint(*grid.blanks)):
            cells[cell] = 0
        while len(both := _solutions(grid, cells, 2)) > 1:  # give back a cell that tells two solutions apart
            cell = rng.choice([cell for cell in range(area) if both[0][cell] != both[1][cell]])
            cells[cell] = solution[cell]
        prompt = "Solve this Sudoku:\n" + _lines(grid, cells)
        return _example(task, prompt, _lines(grid, solution), _renamed(cells))

    return draw


def _shuffled(grid: _Grid, cells: list[int], rng: random.Random) -> list[int]:
    """The grid with rows and columns exchanged inside their bands, and bands exchanged: a solution stays one."""

    def order(band: int) -> list[int]:
        bands = [rng.sample(range(start, start + band), band) for start in range(0, grid.size, band)]
        rng.shuffle(bands)
        return [index for group in bands for index in group]

    rows, columns = order(grid.box_rows), order(grid.box_columns)
    return [cells[row * grid.size + column] for row in rows for column in columns]


# Arithmetic and letters -----------------------------------------------------------------------------------------------


def _draw_arithmetic(rng: random.Random, held: bool) -> Example:
    """Sums and differences of 10..99; a third of the training ones have smaller operands, to learn from."""
    low = 10 if held or rng.random() < 2 / 3 else 1
    high = 99
    a, b = rng.randint(low, high), rng.randint(low, high)
    if low == 1 and rng.random() < 0.7:
        b = rng.randint(1, 9)
    if rng.random() < 0.5:
        return _example("arithmetic", f"What is {a} + {b}?", f"{a} + {b} = {a + b}", f"{min(a, b)}+{max(a, b)}")
    a, b = max(a, b), min(a, b)
    return _example("arithmetic", f"What is {a} - {b}?", f"{a} - {b} = {a - b}", f"{a}-{b}")


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 7)))


def _draw_reverse(rng: random.Random, held: bool) -> Example:
    word = _letters(rng)
    return _example("reverse", f"Reverse the letters: {word}", word[::-1], word)


def _draw_sort(rng: random.Random, held: bool) -> Example:
    word = _letters(rng)
    answer = "".join(sorted(word))
    return _example("sort", f"Sort the letters: {word}", answer, answer)


# Facts ----------------------------------------------------------------------------------------------------------------

COUNTRIES = {  # country: capital, continent
    "France": ("Paris", "Europe"), "Germany": ("Berlin", "Europe"), "Italy": ("Rome", "Europe"),
    "Spain": ("Madrid", "Europe"), "Portugal": ("Lisbon", "Europe"), "Greece": ("Athens", "Europe"),
    "Austria": ("Vienna", "Europe"), "Poland": ("Warsaw", "Europe"), "Norway": ("Oslo", "Europe"),
    "Ireland": ("Dublin", "Europe"), "Sweden": ("Stockholm", "Europe"), "Finland": ("Helsinki", "Europe"),
    "Denmark": ("Copenhagen", "Europe"), "Hungary": ("Budapest", "Europe"), "Latvia": ("Riga", "Europe"),
    "Belgium": ("Brussels", "Europe"), "Iceland": ("Reykjavik", "Europe"), "Romania": ("Bucharest", "Europe"),
    "Egypt": ("Cairo", "Africa"), "Kenya": ("Nairobi", "Africa"), "Ghana": ("Accra", "Africa"),
    "Morocco": ("Rabat", "Africa"), "Tunisia": ("Tunis", "Africa"), "Senegal": ("Dakar", "Africa"),
    "Japan": ("Tokyo", "Asia"), "China": ("Beijing", "Asia"), "India": ("Delhi", "Asia"),
    "Nepal": ("Kathmandu", "Asia"), "Vietnam": ("Hanoi", "Asia"), "Thailand": ("Bangkok", "Asia"),
    "Mongolia": ("Ulaanbaatar", "Asia"), "Peru": ("Lima", "South America"), "Chile": ("Santiago", "South America"),
    "Ecuador": ("Quito", "South America"), "Colombia": ("Bogota", "South America"),
    "Uruguay": ("Montevideo", "South America"), "Canada": ("Ottawa", "North America"),
    "Cuba": ("Havana", "North America"), "Mexico": ("Mexico City", "North America"),
    "Jamaica": ("Kingston", "North America"),
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("high", "low"), ("open", "closed"),
    ("day", "night"), ("up", "down"), ("left", "right"), ("wet", "dry"), ("hard", "soft"), ("full", "empty"),
    ("good", "bad"), ("light", "dark"), ("early", "late"), ("near", "far"), ("true", "false"), ("rich", "poor"),
    ("long", "short"), ("win", "lose"),
]  # fmt: skip
SYMBOLS = {
    "gold": "Au", "silver": "Ag", "iron": "Fe", "copper": "Cu", "lead": "Pb", "tin": "Sn", "zinc": "Zn",
    "sodium": "Na", "potassium": "K", "oxygen": "O", "hydrogen": "H", "carbon": "C", "nitrogen": "N",
    "helium": "He", "neon": "Ne", "calcium": "Ca", "silicon": "Si", "sulfur": "S", "chlorine": "Cl",
    "mercury": "Hg", "nickel": "Ni", "uranium": "U", "lithium": "Li", "aluminium": "Al",
}  # fmt: skip

# One table a relation: the facts, the sentence that answers, the wordings trained on and the wordings held out.
FACTS: dict[str, dict] = {
    "capital": {
        "table": {country: capital for country, (capital, _) in COUNTRIES.items()},
        "answer": "The capital of {x} is {y}.",
        "trained": [
            "What is the capital of {x}?",
            "What's the capital of {x}?",
            "Name the capital of {x}.",
            "Tell me the capital of {x}.",
            "Which city is the capital of {x}?",
            "What city is the capital of {x}?",
            "The capital of {x} is?",
            "{x} has which capital?",
            "What is the capital city of {x}?",
            "Do you know the capital of {x}?",
            "Please give me the capital of {x}.",
            "I want to know the capital of {x}.",
            "What is {x}'s capital?",
            "Say the capital of {x}.",
        ],
        "held": [
            "Can you tell me the capital of {x}?",
            "Give the capital of {x}.",
            "Which is the capital city of {x}?",
            "Please name the capital of {x}.",
        ],
    },
    "continent": {
        "table": {country: continent for country, (_, continent) in COUNTRIES.items()},
        "answer": "{x} is in {y}.",
        "trained": [
            "Where is {x}?",
            "On which continent is {x}?",
            "Which continent is {x} in?",
            "What continent is {x} in?",
            "Name the continent of {x}.",
            "Tell me the continent of {x}.",
            "What is the continent of {x}?",
            "{x} is on which continent?",
            "Do you know where {x} is?",
            "Please tell me where {x} is.",
            "I want to know the continent of {x}.",
            "Say which continent {x} is on.",
            "Can you say where {x} is?",
        ],
        "held": [
            "On what continent is {x}?",
            "Tell me where {x} is.",
            "Please name the continent of {x}.",
            "Do you know which continent {x} is on?",
        ],
    },
    "opposite": {
        "table": {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])},
        "answer": "The opposite of {x} is {y}.",
        "trained": [
            "What is the opposite of {x}?",
            "What's the opposite of {x}?",
            "Name the opposite of {x}.",
            "Tell me the opposite of {x}.",
            "Which word is the opposite of {x}?",
            "The opposite of {x} is?",
            "Give the opposite of {x}.",
            "Do you know the opposite of {x}?",
            "Please tell me the opposite of {x}.",
            "I want to know the opposite of {x}.",
            "Say the opposite of {x}.",
            "What is the opposite word of {x}?",
            "{x} is the opposite of what?",
        ],
        "held": [
            "Can you tell me the opposite of {x}?",
            "What word is the opposite of {x}?",
            "Please give me the opposite of {x}.",
            "Which is the opposite of {x}?",
        ],
    },
    "symbol": {
        "table": SYMBOLS,
        "answer": "The symbol for {x} is {y}.",
        "trained": [
            "What is the symbol for {x}?",
            "What's the symbol for {x}?",
            "Name the symbol for {x}.",
            "Tell me the symbol of {x}.",
            "Which symbol stands for {x}?",
            "The symbol for {x} is?",
            "Give the symbol for {x}.",
            "Do you know the symbol of {x}?",
            "Please tell me the symbol for {x}.",
            "I want to know the symbol for {x}.",
            "Say the symbol of {x}.",
            "What is the chemical symbol of {x}?",
            "{x} has which symbol?",
        ],
        "held": [
            "Can you tell me the symbol for {x}?",
            "What symbol stands for {x}?",
            "Please give me the chemical symbol of {x}.",
            "What is the symbol of {x}?",
        ],
    },
}


def _draw_facts(rng: random.Random, held: bool) -> Example:
    """A fact in a wording of the side that is asked for. All facts are trained on; the wordings are what is new."""
    relation = rng.choice(list(FACTS))
    entry = FACTS[relation]
    x = rng.choice(list(entry["table"]))
    wording = rng.choice(entry["held" if held else "trained"])
    key = f"{'held out' if held else 'trained'}/{relation}/{x}"
    return _example("facts", wording.format(x=x), entry["answer"].format(x=x, y=entry["table"][x]), key)


# Lines to JSON --------------------------------------------------------------------------------------------------------

NAMES = [
    "Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Greta", "Hugo", "Ida", "Jack", "Kate", "Liam", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Vera", "Will", "Zoe", "Max", "Eva",
]  # fmt: skip
COLORS = ["red", "green", "blue", "black", "white", "yellow", "gray", "brown", "pink"]
ANIMALS = ["cat", "dog", "cow", "horse", "goat", "sheep", "duck", "hen", "fox", "bear"]


CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def _made_up(rng: random.Random) -> str:
    """A pronounceable word that is in no list, so that copying has to be learnt."""
    syllables = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(syllables)


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else _made_up(rng).capitalize()


FIELDS: dict[str, Callable[[random.Random], str | int | bool]] = {
    "name": _name,
    "friend": _name,
    "city": lambda rng: rng.choice([capital for capital, _ in COUNTRIES.values() if " " not in capital]),
    "country": lambda rng: rng.choice(list(COUNTRIES)),
    "color": lambda rng: rng.choice(COLORS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "age": lambda rng: rng.randint(1, 99),
    "price": lambda rng: rng.randint(1, 999),
    "size": lambda rng: rng.randint(1, 50),
    "code": lambda rng: "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2)) + str(rng.randint(1, 9)),
    "open": lambda rng: rng.random() < 0.5,
    "word": _made_up,
}


def _draw_json(rng: random.Random, held: bool) -> Example:
    fields = rng.sample(list(FIELDS), rng.randint(2, 4))
    record = {field: FIELDS[field](rng) for field in fields}
    shown = [f"{field}: {json.dumps(v) if isinstance(v, bool) else v}" for field, v in record.items()]
    return _example("json", "Make JSON from:\n" + "\n".join(shown), json.dumps(record), "\n".join(sorted(shown)))


# Gaps -----------------------------------------------------------------------------------------------------------------

# Each line is a row of slots; a slot is a list of things that fit. Any one slot can be the gap, and whatever fits there
# is right, so the answer has to agree with the words on both sides.
LINES: list[list[str]] = [
    ["the", "cat|dog|fox|hen|goat|lion|bear|mouse", "sat|slept|lay|stood|waited",
     "on the|near the|under the|by the", "mat|bed|table|chair|box|sofa|shelf|rug"],
    ["the", "owl|crow|duck|hawk|swan|eagle|dove|gull", "flew|soared|glided",
     "over the|across the|around the", "hill|lake|town|field|wood|river|farm|tower"],
    ["the", "fish|frog|seal|crab|whale|shark|otter|eel", "swam|dived|hid",
     "in the|into the", "sea|pond|bay|water|stream|pool|ocean|canal"],
    ["Anna|Ben|Carl|Dora|Emma|Finn|Hugo|Kate", "ate|cooked|bought|made", "a|the",
     "cake|pie|soup|stew|pizza|salad|egg roll|sandwich", "for lunch|for dinner|at noon|at home"],
    ["Liam|Mia|Noah|Olga|Paul|Rosa|Sam|Tina", "drank", "a cup of|a glass of|a bottle of|a mug of",
     "tea|milk|juice|coffee|cocoa|lemonade", "in the", "kitchen|garden|hall|office|cafe|park"],
    ["the", "bus|car|truck|van|taxi|tram|lorry|bike", "rolled|drove|raced|went",
     "down the|along the|up the", "road|street|lane|avenue|path|track"],
    ["Vera|Will|Zoe|Max|Eva|Jack|Ida|Greta", "read|wrote|opened|lost", "a|the|one",
     "book|letter|story|poem|note|map|diary|novel", "on Monday|on Friday|on Sunday|last night"],
    ["the", "king|queen|farmer|baker|doctor|teacher|sailor|nurse", "gave|sold|showed|sent",
     "the", "boy|girl|child|man|woman|guest", "a", "ring|coat|clock|lamp|hat|coin|watch|gift"],
]  # fmt: skip
GAP = "___"


def _draw_gap(rng: random.Random, held: bool) -> Example:
    number = rng.randrange(len(LINES))
    slots = [slot.split("|") for slot in LINES[number]]
    words = [rng.choice(slot) for slot in slots]
    gap = rng.choice([index for index, slot in enumerate(slots) if len(slot) > 2])

    def line(filler: str) -> str:
        return " ".join([*words[:gap], filler, *words[gap + 1 :]])

    prompt = f"Fill the gap: {line(GAP)}"
    return _example("gap", prompt, line(words[gap]), line(GAP), [line(filler) for filler in slots[gap]])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("sudoku4", "4x4 Sudoku", _draw_sudoku("sudoku4")),
        Task("sudoku6", "6x6 Sudoku", _draw_sudoku("sudoku6")),
        Task("arithmetic", "adding and subtracting 10..99", _draw_arithmetic),
        Task("reverse", "reversing 3 to 7 letters", _draw_reverse),
        Task("sort", "sorting 3 to 7 letters", _draw_sort),
        Task("facts", "facts, asked in a new wording", _draw_facts),
        Task("json", "lines to JSON", _draw_json),
        Task("gap", "filling a gap", _draw_gap),
    )
}
