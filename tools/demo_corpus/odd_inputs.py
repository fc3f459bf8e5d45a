"""Odd inputs, which are not questions: random letters, other scripts, code, symbols, repeated words.

In a chat, the answer is a short statement that the model does not understand the input. In plain text, the
document ends after the odd text. Both kinds of documents train the model to stop early after odd inputs.
"""

import random

from .answers import Pair
from .texts import read_sections
from .words import NOUNS, NUMBERS, PEOPLE, PLACES, pick, strange_word

REPLIES = [
    "I do not understand that. Please ask me something in simple English.",
    "I am sorry, I do not understand that. I am only a small demo model.",
]
LETTERS = "asdfghjklqwertyuiopzxcvbnm"
PUNCTUATION = "!?.,:;-_+*/=<>()[]{}#%&$@~^|\\\"'`"
# First and last code point of ranges outside ASCII: letters of several scripts, symbols and emoji.
CODE_POINT_RANGES = [
    (0x00C0, 0x017F),
    (0x0391, 0x03C9),
    (0x0410, 0x044F),
    (0x05D0, 0x05EA),
    (0x0627, 0x064A),
    (0x0905, 0x0939),
    (0x0E01, 0x0E2E),
    (0x3041, 0x3096),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x2190, 0x27BF),
    (0x1F300, 0x1F64F),
]
FOREIGN = read_sections("odd_inputs")["foreign"]
CODE = read_sections("odd_inputs")["code"]


def key_mash(rng: random.Random) -> str:
    """Return random letters in words of random length."""
    words = rng.randrange(1, 6)
    return " ".join("".join(pick(rng, LETTERS) for _ in range(rng.randrange(2, 14))) for _ in range(words))


def symbols(rng: random.Random) -> str:
    """Return punctuation and digits."""
    return "".join(pick(rng, PUNCTUATION + "0123456789  ") for _ in range(rng.randrange(1, 40)))


def other_script(rng: random.Random) -> str:
    """Return random characters of one script, or of several."""
    is_mixed, script_range = rng.random() < 0.2, pick(rng, CODE_POINT_RANGES)
    characters = []
    for _ in range(rng.randrange(1, 24)):
        first, last = pick(rng, CODE_POINT_RANGES) if is_mixed else script_range
        characters.append(chr(rng.randrange(first, last + 1)))
        if rng.random() < 0.1:
            characters.append(" ")
    return "".join(characters).strip()


def repetition(rng: random.Random) -> str:
    """Return one character or one word many times."""
    unit = pick(
        rng, [pick(rng, LETTERS), pick(rng, PUNCTUATION), pick(rng, NOUNS) + " ", strange_word(rng) + " "]
    )
    return (unit * rng.randrange(3, 60)).strip()


def word_salad(rng: random.Random) -> str:
    """Return words in random order."""
    pools = [NOUNS, NUMBERS, PEOPLE, PLACES]
    words = [
        pick(rng, pick(rng, pools)) if rng.random() < 0.7 else strange_word(rng)
        for _ in range(rng.randrange(2, 12))
    ]
    return " ".join(words)


def digits(rng: random.Random) -> str:
    """Return one to five numbers with signs or spaces between them, such as sums and dates."""
    numbers = [str(rng.randrange(10 ** rng.randrange(1, 9))) for _ in range(rng.randrange(1, 6))]
    return pick(rng, [" ", ", ", " + ", "-", "/", "."]).join(numbers)


def machine_text(rng: random.Random) -> str:
    """Return text that looks like base64, a checksum or a link."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    body = "".join(pick(rng, letters) for _ in range(rng.randrange(8, 60)))
    return pick(rng, ["", "", "https://", "0x", "data:"]) + body + pick(rng, ["", "==", ".html", "/"])


MAKERS = [
    (key_mash, 22),
    (symbols, 14),
    (other_script, 20),
    (repetition, 12),
    (word_salad, 8),
    (digits, 6),
    (machine_text, 6),
    (lambda rng: pick(rng, FOREIGN), 7),
    (lambda rng: pick(rng, CODE), 5),
]


def odd_input(rng: random.Random) -> str:
    """Return an odd input of a random kind."""
    makers, weights = zip(*MAKERS, strict=True)
    return str(rng.choices(makers, weights)[0](rng))


def odd_pair(rng: random.Random) -> Pair:
    """Return an odd input, and the answer that it was not understood."""
    return odd_input(rng), REPLIES[0] if rng.random() < 0.75 else REPLIES[1]
