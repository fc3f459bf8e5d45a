"""Word lists and rules of grammar that all parts of the corpus share."""

import random
from collections.abc import Sequence


def split_list(text: str) -> list[str]:
    """Return the items of a comma-separated text."""
    return [" ".join(item.split()) for item in text.split(",")]


GIRLS = split_list("Lily, Mia, Anna, Rosa, Nora, Emma, Clara, Ivy, Zoe, Maya, Ella, Ruth")
BOYS = split_list("Tom, Ben, Sam, Leo, Max, Finn, Jack, Noah, Omar, Theo, Paul, Hugo")
PEOPLE = GIRLS + BOYS
PET_NAMES = split_list("Pip, Rusty, Momo, Biscuit, Coco, Nibbles, Sunny, Button, Misty, Tiko")

CREATURES = split_list(
    """
    fox, rabbit, bear, mouse, duck, cat, dog, owl, frog, turtle, squirrel, hedgehog, pony, penguin,
    elephant, dragon, robot, lion, cow, wolf, monkey, pig, ghost, whale, bird, wizard
    """
)
PLACES = split_list(
    """
    in a small village, near a green forest, by the sea, on a quiet farm, in a little town, beside a
    wide river, at the foot of a mountain, near a blue lake
    """
)
TOYS = split_list("red ball, blue kite, teddy bear, toy boat, silver key, wooden horse, little drum")
FRUITS = split_list("apple, banana, pear, orange, plum, cherry, lemon, grape, peach, melon")
VEGETABLES = split_list("carrot, potato, onion, pea, bean, cabbage, tomato, leek")
COLORS = split_list("red, blue, green, yellow, orange, purple, white, black, brown, pink")
BOOKS = split_list(
    "The Silver River, A House by the Sea, The Last Lamp, Winter Birds, The Long Road, Under the Old Tree"
)
DAYS = split_list("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = split_list(
    """
    January, February, March, April, May, June, July, August, September, October, November, December
    """
)
CITIES = split_list(
    """
    Paris, London, Berlin, Rome, Madrid, Tokyo, Oslo, Vienna, Lisbon, Athens, Dublin, Prague, Cairo,
    Delhi, Boston, Chicago, New York, San Francisco, Sydney, Toronto, Zurich, Seoul, Hamburg,
    Geneva, Seattle, Warsaw, Helsinki
    """
)
JOBS = split_list("teacher, doctor, baker, farmer, pilot, nurse, painter, driver, cook, singer")
NOUNS = split_list(
    """
    lantern, map, violin, clock, bell, bottle, mirror, hat, button, feather, stone, shell, coin,
    ring, lamp, book, letter, box, spaceship, train, boat, bicycle, wheel, ladder, umbrella, rope,
    cloud, star, rainbow, cave, castle, tower, garden, door, window, telescope, compass, camera,
    piano, drum, flute, sword, crown, carpet, candle, basket, blanket, scarf, shoe, computer,
    balloon, puppet, whistle, treasure, egg, pumpkin, snowflake, painting, trumpet, chair
    """
)
SYLLABLES = split_list(
    """
    bla, kor, min, tus, ver, lo, ra, pin, dex, fu, gal, zo, mer, ti, bo, quan, stra, nel, cy, hu,
    on, ex, pra, vi, lem, ox, ta, ism, ish, er, ing, gra, phy, lan, dor, we, sha, mi, ku
    """
)
NUMBERS = split_list("zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve")
CAPITALS = dict(
    pair.split(": ")
    for pair in split_list(
        """
        France: Paris, Italy: Rome, Spain: Madrid, Germany: Berlin, Portugal: Lisbon,
        Austria: Vienna, Greece: Athens, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki,
        Denmark: Copenhagen, Poland: Warsaw, Ireland: Dublin, England: London, Japan: Tokyo,
        China: Beijing, India: New Delhi, Egypt: Cairo, Kenya: Nairobi, Canada: Ottawa,
        Brazil: Brasilia, Peru: Lima, Cuba: Havana, Hungary: Budapest, Switzerland: Bern,
        Belgium: Brussels, Australia: Canberra, the United States: Washington, Turkey: Ankara,
        South Korea: Seoul
        """
    )
)


def pick(rng: random.Random, options: Sequence[str]) -> str:
    """Return a random option."""
    return options[rng.randrange(len(options))]


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith('us') else 'a'} {noun}"


def upper_first(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def join_list(items: Sequence[str]) -> str:
    """Return items as an English list: ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def plural(noun: str) -> str:
    """Return the plural of a regular noun or of "mouse"."""
    if noun in {"mouse"}:
        return "mice"
    if noun.endswith(("x", "s", "ch", "sh", "to")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def strange_word(rng: random.Random) -> str:
    """Return an invented word. Questions about invented words train the model to answer "I do not know"."""
    return "".join(pick(rng, SYLLABLES) for _ in range(rng.randrange(2, 5)))


def some_name(rng: random.Random) -> str:
    """Return the name of a person. One in four is invented, so that the model learns to copy names."""
    return strange_word(rng).capitalize() if rng.random() < 0.25 else pick(rng, PEOPLE)


def some_city(rng: random.Random) -> str:
    """Return a city. One in four is invented, so that the model learns to copy names."""
    if rng.random() < 0.25:
        return strange_word(rng).capitalize()
    return pick(rng, CITIES) if rng.random() < 0.7 else pick(rng, list(CAPITALS.values()))
