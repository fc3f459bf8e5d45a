"""Labels of internationalised host names (IDNA 2008), checked with Python's character properties."""

from __future__ import annotations

import unicodedata

# Exceptions of RFC 5892, 2.6: always valid and never valid.
_ALWAYS_VALID = {0xDF, 0x3C2, 0x6FD, 0x6FE, 0xF0B, 0x3007}
_NEVER_VALID = {0x640, 0x7FA, 0x302E, 0x302F, *range(0x3031, 0x3036), 0x303B}
_OLD_HANGUL = [(0x1100, 0x11FF), (0xA960, 0xA97C), (0xD7B0, 0xD7FB)]
_EXCLUDED_RANGES = [  # ignorable characters and ignorable blocks of RFC 5892
    (0xFE00, 0xFE0F),
    (0x180B, 0x180F),
    (0xE0000, 0xE0FFF),
    (0x20D0, 0x20FF),
    (0x1D100, 0x1D1FF),
]


def is_u_label(label: str) -> bool:
    """Return whether a label with non-ASCII characters may be registered (RFC 5891, 4.2).

    Zero-width joiners and non-joiners are allowed only after a virama. RFC 5892 also allows non-joiners in
    some other places.
    """
    if not label or label.startswith("-") or label.endswith("-") or label[2:4] == "--":
        return False
    if unicodedata.normalize("NFC", label) != label or unicodedata.category(label[0]).startswith("M"):
        return False
    return all(_is_allowed(label, index) for index in range(len(label))) and _satisfies_bidi_rule(label)


def _is_allowed(label: str, index: int) -> bool:
    """Return whether the character at an index is allowed there (RFC 5892, with its contextual rules)."""
    char = label[index]
    code_point = ord(char)
    previous_char, next_char = label[index - 1 : index], label[index + 1 : index + 2]
    if code_point in (0x200C, 0x200D):
        return bool(previous_char) and unicodedata.combining(previous_char) == 9
    if code_point == 0xB7:
        return previous_char == next_char == "l"
    if code_point == 0x375:
        return "GREEK" in unicodedata.name(next_char, "") if next_char else False
    if code_point in (0x5F3, 0x5F4):
        return bool(previous_char) and "HEBREW" in unicodedata.name(previous_char, "")
    if code_point == 0x30FB:
        words = ("HIRAGANA", "KATAKANA", "CJK UNIFIED", "IDEOGRAPHIC")
        return any(
            unicodedata.name(character, "").startswith(words) for character in label if character != char
        )
    if 0x660 <= code_point <= 0x669:
        return not any(0x6F0 <= ord(character) <= 0x6F9 for character in label)
    if 0x6F0 <= code_point <= 0x6F9:
        return not any(0x660 <= ord(character) <= 0x669 for character in label)
    return _is_valid(char)


def _is_valid(char: str) -> bool:
    """Return whether a character is allowed at all positions of a label (PVALID of RFC 5892)."""
    code_point = ord(char)
    if code_point in _ALWAYS_VALID or code_point in _NEVER_VALID:
        return code_point in _ALWAYS_VALID
    if code_point < 128:
        return char == "-" or char.isdigit() or "a" <= char <= "z"
    if any(low <= code_point <= high for low, high in [*_OLD_HANGUL, *_EXCLUDED_RANGES]):
        return False
    if unicodedata.category(char) not in ("Ll", "Lu", "Lo", "Nd", "Lm", "Mn", "Mc"):
        return False
    folded_char = unicodedata.normalize("NFKC", char).casefold()
    return unicodedata.normalize("NFKC", folded_char) == char


def _satisfies_bidi_rule(label: str) -> bool:
    """Return whether a label satisfies the bidi rule of RFC 5893."""
    directions = [unicodedata.bidirectional(char) for char in label]
    if not {"R", "AL", "AN"} & set(directions):
        return True
    last_direction = next((direction for direction in reversed(directions) if direction != "NSM"), "")
    allowed_classes = {"R", "AL", "AN", "EN", "ES", "CS", "ET", "ON", "BN", "NSM"}
    return (
        directions[0] in ("R", "AL")
        and set(directions) <= allowed_classes
        and last_direction in ("R", "AL", "EN", "AN")
        and not {"EN", "AN"} <= set(directions)
    )
