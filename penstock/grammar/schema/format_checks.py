"""Checks of string formats that need more than a regular expression."""

from __future__ import annotations

import re
from datetime import date, timedelta
from ipaddress import AddressValueError, IPv6Address

from penstock.grammar.schema.idna import is_u_label

_TIME = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60)(\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):([0-5][0-9]))"
)
_DATE = re.compile("([0-9]{4})-([0-9]{2})-([0-9]{2})")
_LABEL = re.compile("[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ATEXT = "A-Za-z0-9!#$%&'*+/=?^_`{|}~\u0080-\U0010ffff-"
_DOT_STRING = re.compile(rf"[{_ATEXT}]+(?:\.[{_ATEXT}]+)*")
_QUOTED_LOCAL_PART = re.compile('"(?:[ !#-\\[\\]-~\u0080-\U0010ffff]|\\\\[ -~])*"')
_IPV4 = re.compile(r"(?:(?:[01]?[0-9]{1,2}|2[0-4][0-9]|25[0-5])(?:\.(?!$)|$)){4}")
_IDN_DOTS = re.compile("[.\u3002\uff0e\uff61]")
_REGEX_TOKEN = re.compile(
    r"\\[dDwWsSbB]|\\[nrtfv]|\\c[A-Za-z]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\u\{0*(?:10|[0-9A-Fa-f])?[0-9A-Fa-f]{1,4}\}"
    r"|\\[pP]\{[A-Za-z_]+(?:=[A-Za-z0-9_]+)?\}|\\k<[A-Za-z_$][A-Za-z0-9_$]*>|\\0(?![0-9])|\\[1-9][0-9]*"
    r"|\\[^A-Za-z0-9]|\((?:\?(?::|<?[=!]|<[A-Za-z_$][A-Za-z0-9_$]*>))?|(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??|.",
    re.DOTALL,
)


def full_match(expression: re.Pattern[str], value: str) -> bool:
    """Return whether an expression matches a whole value."""
    return expression.fullmatch(value) is not None


def is_time(value: str) -> bool:
    """Return whether a string is a time of RFC 3339. A leap second must be the last second of a UTC day."""
    return _leap_minutes(value) is not False


def is_date_time(value: str) -> bool:
    """Return whether a string is a date-time of RFC 3339. A leap second must end a UTC June or December."""
    day = _day(value[:10])
    minutes = _leap_minutes(value[11:]) if value[10:11] in ("T", "t") else False
    if day is None or minutes is False:
        return False
    if minutes is None:
        return True
    try:
        next_day = day + timedelta(days=minutes // 1440 + 1)  # the UTC day after the leap second
    except OverflowError:
        return False
    return next_day.day == 1 and next_day.month in (1, 7)


def _day(value: str) -> date | None:
    match = _DATE.fullmatch(value)
    try:
        return date(*map(int, match.groups())) if match else None
    except ValueError:
        return None


def _leap_minutes(value: str) -> int | bool | None:
    """Return the UTC minute of a leap second, counted from 00:00 UTC of the local date: -1 or 1439.

    Returns None if the time is valid but not a leap second. Returns False if the time is invalid, or a leap
    second that is not at the end of a UTC day.
    """
    parts = _TIME.fullmatch(value)
    if parts is None:
        return False
    hour, minute, second, _, offset, offset_hour, offset_minute = parts.groups()
    if second != "60":
        return None
    offset_minutes = int(offset_hour or 0) * 60 + int(offset_minute or 0)
    minutes = int(hour) * 60 + int(minute) + (offset_minutes if offset.startswith("-") else -offset_minutes)
    return minutes if minutes % 1440 == 1439 else False


def is_hostname(value: str) -> bool:
    """Return whether a string is a host name of RFC 1123. ``xn--`` labels must be A-labels of RFC 5891."""
    return len(value) <= 253 and all(map(_is_ldh_label, value.split(".")))


def _is_ldh_label(label: str) -> bool:
    if not _LABEL.fullmatch(label):
        return False
    if not label[:4].lower() == "xn--":
        return True
    try:
        decoded_label = label[4:].lower().encode().decode("punycode")
        reencoded_label = decoded_label.encode("punycode").decode()
    except (UnicodeError, ValueError, OverflowError):
        return False
    return reencoded_label == label[4:].lower() and not decoded_label.isascii() and is_u_label(decoded_label)


def is_idn_hostname(value: str) -> bool:
    """Return whether a string is an internationalised host name of RFC 5890."""
    if len(value) > 253:  # the ASCII form, whose maximum is 253, is never shorter than the Unicode form
        return False
    labels = _IDN_DOTS.split(value)
    ascii_length = 0
    for label in labels:
        if label.isascii():
            if not _is_ldh_label(label):
                return False
            ascii_length += len(label) + 1
        else:
            size = len(label.encode("punycode", "replace")) + 4
            if size > 63 or not is_u_label(label):
                return False
            ascii_length += size + 1
    return ascii_length - 1 <= 253


def is_email(value: str) -> bool:
    """Return whether a string is a mailbox of RFC 5321."""
    return value.isascii() and is_idn_email(value)


def is_idn_email(value: str) -> bool:
    """Return whether a string is a mailbox of RFC 6531."""
    local_part, at_sign, domain = value.rpartition("@")
    if (
        not at_sign
        or len(local_part.encode(errors="replace")) > 64
        or len(value.encode(errors="replace")) > 254
    ):
        return False
    if not (_QUOTED_LOCAL_PART if local_part.startswith('"') else _DOT_STRING).fullmatch(local_part):
        return False
    if domain.startswith("["):
        return domain.endswith("]") and _is_address_literal(domain[1:-1])
    return is_idn_hostname(domain) and not re.search("[\u3002\uff0e\uff61]", domain)


def _is_address_literal(text: str) -> bool:
    """Return whether a text is the content of a mailbox's address literal ``[...]``."""
    if text[:5].lower() != "ipv6:":
        return _IPV4.fullmatch(text) is not None
    try:
        address = IPv6Address(text[5:])
    except AddressValueError:
        return False
    groups = [group for group in text[5:].split(":") if group]
    num_groups_written = len(groups) + ("." in groups[-1] if groups else 0)
    return not address.scope_id and (num_groups_written <= 6 or "::" not in text)


def is_regex(value: str) -> bool:
    """Return whether a string is a regular expression of ECMA 262."""
    position = num_groups = highest_reference = 0
    depth = 0
    names: set[str] = set()
    referenced_names: set[str] = set()
    can_repeat = False
    while position < len(value):
        if value[position] == "[":
            position = _class_end(value, position + 1)
            if position < 0:
                return False
            can_repeat = True
            continue
        token = match.group() if (match := _REGEX_TOKEN.match(value, position)) else ""
        position += len(token)
        if token == "\\":  # an invalid escape
            return False
        is_quantifier = token[0] in "*+?" or (token[0] == "{" and len(token) > 1)
        if is_quantifier:
            if not can_repeat or not _is_ordered(token):
                return False
            can_repeat = False
            continue
        if token[0] == "(":
            depth += 1
            if token == "(" and value[position : position + 1] == "?":
                return False  # (? with a construct that ECMA 262 does not have
            if token == "(" or (token.startswith("(?<") and token[-1] == ">"):
                num_groups += 1
            if token.startswith("(?<") and token[-1] == ">":
                if token[3:-1] in names:
                    return False
                names.add(token[3:-1])
        elif token == ")":
            depth -= 1
            if depth < 0:
                return False
        elif token.startswith("\\k"):
            referenced_names.add(token[3:-1])
        elif token[0] == "\\" and token[1] in "123456789":
            highest_reference = max(highest_reference, int(token[1:]))
        can_repeat = token not in ("^", "$", "|", "\\b", "\\B") and token[0] != "("
    return depth == 0 and highest_reference <= num_groups and referenced_names <= names


def _is_ordered(quantifier: str) -> bool:
    low, comma, high = quantifier.rstrip("?").strip("{}").partition(",")
    return not (comma and high) or int(low) <= int(high)


def _class_end(value: str, position: int) -> int:
    """Return the index after a character class whose content begins at `position`; -1 if it is invalid."""
    position += value[position : position + 1] == "^"
    previous: int | None = None  # previous character, which may be the first character of a range
    in_range = False
    while position < len(value) and value[position] != "]":
        token = match.group() if (match := _REGEX_TOKEN.match(value, position)) else ""
        token = token if token[0] == "\\" else value[position]
        if token == "\\" or token[:2] in ("\\k", "\\B") or re.match(r"\\[1-9]", token):
            return -1
        position += len(token)
        if token == "-" and previous is not None and value[position : position + 1] not in ("]", ""):
            in_range = True
            continue
        code_point = _code_point(token)
        if in_range and (code_point is None or previous is None or code_point < previous):
            return -1
        previous, in_range = (None, False) if in_range else (code_point, False)
    return position + 1 if position < len(value) else -1


def _code_point(token: str) -> int | None:
    """Return the code point of a class member; None if the member stands for several characters."""
    if len(token) == 1:
        return ord(token)
    if token[1] in "dDwWsSpP":
        return None
    if token[1] in "xu":
        return int(token[2:].strip("{}"), 16)
    if token[1] == "c":
        return ord(token[2]) % 32
    return {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "b": 8, "0": 0}.get(token[1], ord(token[1]))
