"""Random texts for `benchmarks/embeddings.py`."""

from __future__ import annotations

import random

WORDS = (
    "the a of to and in that it is was for on with as by at from this be have water time people house year "
    "small large river city night light music paper book train garden winter question answer machine number"
).split()
WORDS_BY_TEXT_KIND = {
    "Latin": (
        "the of water night music paper book train garden winter question answer machine number river city "
        "light house people year search engine database vector semantic retrieval python kernel memory"
    ),
    "German": "Straße Übung Wasser Nacht Fräulein größer möchte Bücher Züge Gärten Frage Antwort Maschine",
    "French": "être garçon français élève où déjà hôtel naïve cœur leçon été fenêtre",
    "Cyrillic": "вода ночь музыка бумага книга поезд сад зима вопрос ответ машина число река город свет",
    "Greek": "νερό νύχτα μουσική χαρτί βιβλίο τρένο κήπος χειμώνας ερώτηση",
    "Chinese": "水 夜晚 音乐 纸 书 火车 花园 冬天 问题 答案 机器 数字 你好 世界",
    "Japanese": "みず よる おんがく 紙 本 電車 庭 冬 質問 こたえ きかい ありがとう",
    "Korean": "물 밤 음악 종이 책 기차 정원 겨울 질문 대답 기계 안녕하세요",
    "Arabic": "ماء ليل موسيقى ورق كتاب قطار حديقة شتاء سؤال جواب آلة",
    "Hebrew": "מים לילה מוזיקה נייר ספר רכבת גן חורף שאלה תשובה",
    "Devanagari": "पानी रात संगीत कागज किताब ट्रेन बगीचा सर्दी सवाल जवाब",
    "Thai": "น้ำ กลางคืน ดนตรี กระดาษ หนังสือ รถไฟ สวน",
    "numbers": "1 42 3.14159 2026-11-25 1e-7 0xff 100% $9.99 17:30 +44",
    "code": (
        "def return print(x) for i in range(n): {} [] => && || != a_b camelCase /usr/bin "
        "http://example.com/a?b=c <html>"
    ),
    "signs": "! ? . , ; : - … « » “ ” € £ © ® 😀 🚀 ❤️ 🇩🇪 ½ √ ∞ ∑",
}
"""Kind of text (a script, a language, numbers, code or signs) -> its words, separated by spaces."""
NUMBERS_OF_WORDS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
"""Numbers of words in the texts of `make_texts_of_all_kinds`."""


def make_texts(num_texts: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Return ``num_texts`` random English texts of ``shortest`` to ``longest`` tokens.

    The lengths are uniformly distributed and include the two special tokens. Each word is about one token.
    """
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest) - 2)) for _ in range(num_texts)]


def make_texts_of_all_kinds(num_texts: int, seed: int) -> list[str]:
    """Return random texts whose lengths are `NUMBERS_OF_WORDS` in turn.

    Every fifth text mixes words of all kinds of `WORDS_BY_TEXT_KIND`. The four texts before it have words of
    one kind each.
    """
    rng = random.Random(seed)
    words_by_kind = [words.split() for words in WORDS_BY_TEXT_KIND.values()]
    texts = []
    for i in range(num_texts):
        num_words = NUMBERS_OF_WORDS[i % len(NUMBERS_OF_WORDS)]
        words_of_one_kind = words_by_kind[(i // len(NUMBERS_OF_WORDS) + i) % len(words_by_kind)]
        if i % 5 == 4:
            words = [rng.choice(rng.choice(words_by_kind)) for _ in range(num_words)]
        else:
            words = rng.choices(words_of_one_kind, k=num_words)
        texts.append(" ".join(words))
    return texts
