"""Short sentences from a grammar of templates and word classes, for the training and for a recognizer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path


def split_list(text: str) -> list[str]:
    """Return the items of a comma-separated text."""
    return [" ".join(item.split()) for item in text.split(",")]


CLASSES: Mapping[str, list[str]] = {
    "PERSON": split_list(
        """
        the teacher, my mother, my father, his sister, her brother, the old man, a young woman, the
        doctor, our friend, the farmer, a small boy, the girl, my uncle, the king, the queen, a
        stranger, the baker, your neighbor, the captain, the children, the driver, a singer, the
        writer, my cousin
        """
    ),
    "ANIMAL": split_list(
        """
        dog, cat, horse, bird, fox, rabbit, bear, mouse, duck, owl, frog, sheep, cow, lion, wolf,
        monkey, pig, fish, snake, turtle, goat, elephant, tiger, spider
        """
    ),
    "ADJ": split_list(
        """
        red, blue, green, yellow, white, black, brown, big, small, old, new, young, good, bad, long,
        short, happy, sad, warm, cold, soft, hard, fast, slow, heavy, light, dark, bright, quiet,
        loud, clean, dirty, rich, poor, strong, weak, sweet, fresh, empty, full, strange, simple,
        famous, lovely, hungry, tired, brave, gentle, silver, golden, wooden, broken
        """
    ),
    "THING": split_list(
        """
        ball, book, table, chair, door, window, house, garden, tree, flower, river, mountain, road,
        bridge, car, train, boat, letter, picture, clock, lamp, box, key, cup, plate, knife, bottle,
        hat, coat, shoe, ring, bell, stone, star, cloud, song, story, game, school, kitchen, farm,
        village, city, castle, island, forest, field, beach, market, church, hospital, office, ship,
        wheel, rope, basket, blanket, pillow, mirror, candle, piano, guitar, drum, camera, computer,
        telephone, newspaper, magazine, ticket, map, coin, button, ladder, fence, roof, wall, floor,
        corner, pocket, engine, machine, question, answer, word, number, idea, dream, holiday,
        birthday, party, dinner, breakfast, lunch
        """
    ),
    "FOOD": split_list(
        """
        bread, cheese, butter, apples, oranges, bananas, milk, water, coffee, tea, sugar, salt,
        soup, meat, rice, eggs, cake, honey, chocolate, potatoes, tomatoes, carrots, cherries,
        lemons, cookies, sandwiches, fish, chicken, juice, ice cream
        """
    ),
    "DID": split_list(
        """
        found, saw, lost, bought, sold, painted, cleaned, opened, closed, carried, dropped, broke,
        moved, made, drew, hid, held, wanted, needed, liked, loved, watched, remembered, forgot,
        touched, washed, fixed, built, took, kept, left, showed, chose, sent, stole, described
        """
    ),
    "EAT": split_list(
        """
        ate, cooked, bought, tasted, shared, brought, ordered, liked, wanted, sold, carried, served
        """
    ),
    "WENT": split_list(
        """
        walked, ran, went, came, drove, jumped, traveled, moved, hurried, turned, looked, sailed,
        climbed
        """
    ),
    "PREP": split_list(
        """
        to, into, past, behind, near, around, across, toward, from, over
        """
    ),
    "WHEN": split_list(
        """
        today, yesterday, last night, this morning, on Monday, on Tuesday, on Wednesday, on
        Thursday, on Friday, on Saturday, on Sunday, in January, in March, in April, in June, in
        July, in August, in October, in winter, in summer, last year, again, every day, at night,
        after lunch, before dinner, for an hour, two days ago, five years ago, at seven o'clock
        """
    ),
    "WEATHER": split_list(
        """
        sunny, cloudy, windy, rainy, cold, warm, hot, dark, quiet, foggy, wet, dry
        """
    ),
    "NAME": split_list(
        """
        Anna, Tom, Mary, Peter, Lucy, Jack, Emma, David, Sarah, Paul, Helen, Robert, Alice, James,
        Nina, Mark, Laura, Oscar, Julia, Simon
        """
    ),
    "CITY": split_list(
        """
        Paris, London, Berlin, Rome, Madrid, Boston, Chicago, New York, Dublin, Vienna, Tokyo,
        Sydney
        """
    ),
    "NUM": split_list(
        """
        one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, thirty,
        fifty, a hundred
        """
    ),
    "PLURAL": split_list(
        """
        books, horses, dogs, cats, birds, trees, flowers, houses, stars, boats, letters, pictures,
        apples, stones, coins, children, friends, windows, chairs, stories, songs, questions,
        people, ships
        """
    ),
    "HOW": split_list(
        """
        slowly, quickly, quietly, carefully, gladly, suddenly, often, never, always, sometimes,
        really, probably
        """
    ),
}
"""Name of a word class in templates -> the words of the class."""

TEMPLATES = (
    "PERSON DID the ADJ THING",
    "PERSON DID the THING WHEN",
    "PERSON DID a ADJ ADJ THING",
    "the ADJ ANIMAL WENT PREP the THING",
    "the ANIMAL and the ANIMAL WENT PREP the ADJ THING",
    "NAME EAT FOOD and FOOD",
    "NAME EAT some FOOD WHEN",
    "PERSON HOW DID the THING",
    "it was a WEATHER day",
    "it was WEATHER and WEATHER WHEN",
    "there are NUM PLURAL PREP the THING",
    "NAME has NUM ADJ PLURAL",
    "where is the ADJ THING",
    "where did NAME put the THING",
    "who DID my THING",
    "do you like FOOD",
    "I like FOOD and FOOD",
    "I want to see the ADJ THING",
    "we WENT PREP the THING WHEN",
    "they live in CITY",
    "NAME WENT to CITY WHEN",
    "please open the THING",
    "please give me the ADJ THING",
    "please bring some FOOD",
    "can you see the ANIMAL PREP the THING",
    "the THING is ADJ and ADJ",
    "this THING is very ADJ",
    "my THING is ADJ",
    "NAME and NAME DID a THING",
    "hello NAME",
    "hello NAME how are you WHEN",
    "good morning NAME",
    "good night NAME",
    "thank you very much NAME",
    "the ADJ ANIMAL HOW EAT FOOD",
    "PERSON is ADJ WHEN",
    "NUM ADJ PLURAL",
    "what is your ADJ THING",
    "why is the ANIMAL ADJ",
    "she DID her ADJ THING",
    "he DID his THING WHEN",
    "you DID the ADJ THING",
    "NUM and NUM",
    "that was a ADJ idea",
    "hello world",
    "nice to meet you NAME",
    "see you WHEN",
    "I am ADJ",
    "we are ADJ and ADJ",
    "the train to CITY is ADJ",
    "my name is NAME",
)

_QUESTION_WORDS = ("where", "who", "do", "can", "what", "why")
_WORDS = Path(__file__).with_name("words.txt")


def sentence(rng: random.Random) -> str:
    """Return a random sentence of the grammar."""
    template = rng.choice(TEMPLATES)
    words = [rng.choice(CLASSES[word]) if word in CLASSES else word for word in template.split()]
    text = " ".join(words)
    is_question = words[0] in _QUESTION_WORDS or "how are" in template
    return text[0].upper() + text[1:] + ("?" if is_question else ".")


def grammar_words() -> list[str]:
    """Return the words of the grammar, sorted."""
    items = [item for items in CLASSES.values() for item in items]
    items += [word for template in TEMPLATES for word in template.split() if word not in CLASSES]
    return sorted({word.lower() for item in items for word in item.split()})


def further_words() -> list[str]:
    """Return further English words. Some of them are also in the grammar."""
    return _WORDS.read_text().split()


def training_texts(seed: int, num_texts: int, num_phrases: int) -> list[str]:
    """Return texts: single words, phrases of one to four words, and distinct sentences.

    Args:
        seed: the seed of the phrases and sentences.
        num_texts: total number of texts.
        num_phrases: number of texts that are words and phrases.
    """
    rng = random.Random(seed)
    grammar_vocabulary, other_words = grammar_words(), further_words()
    texts = [*grammar_vocabulary, *other_words]
    while len(texts) < num_phrases:
        words = [
            rng.choice(grammar_vocabulary if rng.random() < 0.6 else other_words)
            for _ in range(rng.choice((1, 2, 2, 3, 4)))
        ]
        texts.append(" ".join(words) + rng.choice(("", ".", "?")))
    seen_texts = set(texts)
    while len(texts) < num_texts:
        if (text := sentence(rng)) not in seen_texts:
            seen_texts.add(text)
            texts.append(text)
    return texts


def recognizer_grammar(further_sentences: Sequence[str] = ()) -> str:
    """Return the grammar in the Java Speech Grammar Format (JSGF).

    Args:
        further_sentences: sentences that are added to the grammar.
    """
    lines = ["#JSGF V1.0;", "grammar sentences;"]
    for name, items in CLASSES.items():
        lines.append(f"<{name}> = {' | '.join(item.lower() for item in items)};")
    rules = [
        " ".join(f"<{word}>" if word in CLASSES else word.lower() for word in template.split())
        for template in TEMPLATES
    ]
    rules += [text.lower() for text in further_sentences]
    lines.append(f"public <sentence> = {' | '.join(rules)};")
    return "\n".join(lines)
