"""String formats. Each format has a regular expression for grammars and a check of values.

An expression matches only values of the format. If an expression of all values would result in a grammar that
is too large, the expression excludes the values that its comment describes. `has_format` accepts the excluded
values too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

from penstock.grammar.schema import format_checks
from penstock.grammar.schema.format_checks import full_match
from penstock.grammar.schema.regex_parser import parse_regex
from penstock.grammar.schema.regex_tree import RegexNode

# -- Dates and times (RFC 3339) --------------------------------------------------------------------------

# Month and day, except in February. `_DATE` adds February and the closing parenthesis.
_MONTHS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_LEAP_DAY = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29"
_LEAP_DAY_OF_CENTURY = "(?:0[48]|[2468][048]|[13579][26])00-02-29"
# Without the year 0000, which Python's date does not support.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"(?:{_YEAR}-{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_DAY}|{_LEAP_DAY_OF_CENTURY})"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = "(?:\\.[0-9]+)?"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-]{_HOUR_MINUTE})"


def _leap_seconds() -> tuple[str, str]:
    """Return two expressions of local times equal to 23:59:60 UTC, a leap second.

    In the first expression, the local day is the UTC day. In the second expression, the local day is the day
    after the UTC day. The expressions contain only UTC offsets that are multiples of half an hour.
    """
    same_day = [f"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"]
    next_day = [f"{hour:02}:29:60{_FRACTION}\\+{hour:02}:30" for hour in range(24)]
    for hour in range(23):
        same_day.append(f"{hour:02}:59:60{_FRACTION}-{23 - hour:02}:00")
        next_day.append(f"{hour:02}:59:60{_FRACTION}\\+{hour + 1:02}:00")
    same_day += [f"{hour:02}:29:60{_FRACTION}-{23 - hour:02}:30" for hour in range(24)]
    return "|".join(same_day), "|".join(next_day)


_SAME_DAY, _NEXT_DAY = _leap_seconds()
_DATE_TIME = (
    f"{_DATE}[Tt]{_TIME}|{_YEAR}-(?:(?:06-30|12-31)[Tt](?:{_SAME_DAY})|(?:07-01|01-01)[Tt](?:{_NEXT_DAY}))"
)

# RFC 3339, appendix A.
_DURATION_DAYS = "(?:[0-9]+D)"
_DURATION_MONTHS = f"(?:[0-9]+M{_DURATION_DAYS}?)"
_DURATION_TIME = "T(?:[0-9]+(?:H(?:[0-9]+M(?:[0-9]+S)?)?|M(?:[0-9]+S)?|S))"
_DURATION_DATE = f"[0-9]+(?:Y{_DURATION_MONTHS}?|M{_DURATION_DAYS}?|D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

# -- Addresses -------------------------------------------------------------------------------------------

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6(max_shortened_groups: int) -> str:
    """Return an expression of IPv6 addresses (RFC 4291, 2.2).

    Args:
        max_shortened_groups: maximum number of groups in an address that contains ``::``.
    """

    def more_groups(max_groups: int) -> str:
        """Return the expression after a group that follows ``::``."""
        if max_groups == 0:
            return ""
        options = f"{_GROUP}{more_groups(max_groups - 1)}" + (f"|{_IPV4}" if max_groups >= 2 else "")
        return f"(?::(?:{options}))?"

    def groups_after_double_colon(max_groups: int) -> str:
        """Return the expression after ``::``."""
        if max_groups == 0:
            return ""
        return f"(?:{_GROUP}{more_groups(max_groups - 1)}" + (f"|{_IPV4}" if max_groups >= 2 else "") + ")?"

    def expression_after(num_groups: int) -> str:
        """Return the expression after ``num_groups`` groups at the start."""
        if num_groups == 8:
            return ""
        options = [f"{_GROUP}{expression_after(num_groups + 1)}"]
        if num_groups <= max_shortened_groups:
            options.append(f":{groups_after_double_colon(max_shortened_groups - num_groups)}")
        if num_groups == 6:
            options.append(_IPV4)
        return f":(?:{'|'.join(options)})"

    return f"(?:::{groups_after_double_colon(max_shortened_groups)}|{_GROUP}{expression_after(1)})"


_IPV6 = _ipv6(7)


def _label(max_count: int) -> str:
    """Return an expression of host name labels (RFC 1123) with at most `max_count` characters.

    Hyphens at both positions 3 and 4 are excluded (RFC 5891).
    """
    return (
        "[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9]"
        f"|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{{0,{max_count - 5}}}[A-Za-z0-9])?"
    )


# Excluded: valid names (at most 253 characters) that have more or longer labels than each alternative allows.
_HOST = (
    f"(?:{_label(63)}(?:\\.{_label(63)}){{0,2}}(?:\\.{_label(61)})?"
    f"|{_label(63)}(?:\\.{_label(26)}){{0,7}}|{_label(15)}(?:\\.{_label(15)}){{0,14}})"
)
_MAIL_HOST = (  # at most 189 characters, so that an address has at most 254 (RFC 5321, 4.5.3.1.3)
    f"(?:{_label(63)}(?:\\.{_label(62)}){{0,2}}|{_label(63)}(?:\\.{_label(17)}){{0,7}}"
    f"|{_label(15)}(?:\\.{_label(15)}){{0,10}})"
)
_ADDRESS_LITERAL = f"\\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_ipv6(6)})\\]"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# Excluded: local parts with several dots that exceed the lengths of all these alternatives.
_LOCAL_PART = f"(?:{_ATOM}{{1,64}}|{_ATOM}(?:\\.?{_ATOM}){{0,31}}|{_ATOM}{{1,31}}\\.{_ATOM}{{1,32}})"
_QUOTED_LOCAL_PART = '"(?:[ !#-\\[\\]-~]|\\\\[ -~]){0,31}"'  # a local part of at most 64 characters
_EMAIL = f"(?:{_LOCAL_PART}|{_QUOTED_LOCAL_PART})@(?:{_MAIL_HOST}|{_ADDRESS_LITERAL})"

# Letters of many scripts that IDNA 2008 allows without conditions. All other non-ASCII letters are excluded.
_LETTERS = (
    "\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c1\u03c3-\u03ce\u0430-\u045f\u0561-\u0586\u0905-\u0939\u0e01-\u0e2e\u0e40-\u0e44"
    "\u10d0-\u10f0\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_MARKS = "\u093e-\u094d\u0e30-\u0e32\u0e34-\u0e3a\u0e45-\u0e4e"  # combining marks, which cannot begin a label
_RIGHT_TO_LEFT = "\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u067e\u0686\u0698\u06a9\u06af\u06cc"
_LETTER_GROUP = f"[{_LETTERS}][a-z0-9]{{0,4}}(?:-[a-z0-9]{{1,4}})?"
_ONE_LETTER_LABEL = f"(?:[a-z0-9]{{1,16}}-?)?[{_LETTERS}][a-z0-9]{{0,16}}(?:-[a-z0-9]{{1,14}})?"
_U_LABEL = (  # labels of at most 63 octets in their ASCII form
    f"(?:[a-z0-9{_LETTERS}][a-z0-9{_LETTERS}{_MARKS}]{{0,8}}[{_LETTERS}{_MARKS}]"
    f"|(?:[a-z0-9]{{1,8}}-?)?{_LETTER_GROUP}(?:-?{_LETTER_GROUP}){{0,2}}|{_ONE_LETTER_LABEL}|[{_RIGHT_TO_LEFT}]{{1,10}})"
)
# Excluded: host names of more than 3 labels with a non-ASCII label. In addresses with a non-ASCII character:
# host names of more than 2 labels, and local parts of more than 21 characters or with several dots.
_IDN_LABEL = f"(?:{_label(63)}|{_U_LABEL})"
_IDN_HOST = f"(?:{_HOST}|{_IDN_LABEL}(?:\\.{_IDN_LABEL}){{0,2}})"
_IDN_ATOM = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_LETTERS}-]"
_IDN_EMAIL = (
    f"(?:{_EMAIL}|(?:{_IDN_ATOM}{{1,21}}|{_IDN_ATOM}{{1,10}}\\.{_IDN_ATOM}{{1,10}})"
    f"@{_IDN_LABEL}(?:\\.{_IDN_LABEL}){{0,1}})"
)

# -- URIs (RFC 3986) and IRIs (RFC 3987) -----------------------------------------------------------------

_UNRESERVED = "A-Za-z0-9._~"  # The hyphen is unreserved too. It is added at the end of each character class.
_SUB_DELIMS = "!$&'()*+,;="
_PERCENT_ESCAPE = "%[0-9A-Fa-f]{2}"
# Excludes the directional marks, which RFC 3987 forbids.
_UCS_CHARACTERS = (
    "\u00a0-\u200d\u2010-\u2029\u202f-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + f"{chr(0xE1000)}-{chr(0xEFFFD)}"
)
_PRIVATE_USE = f"\ue000-\uf8ff{chr(0xF0000)}-{chr(0xFFFFD)}{chr(0x100000)}-{chr(0x10FFFD)}"


def _repeated(characters: str) -> str:
    """Return an expression that matches any number of ``characters`` and percent-encoded characters."""
    return f"[{characters}-]*(?:{_PERCENT_ESCAPE}[{characters}-]*)*"


def _uri(iri_characters: str, query_characters: str, *, is_reference: bool, is_simple: bool = False) -> str:
    """Return an expression of URIs or IRIs.

    Args:
        iri_characters: additional characters of IRIs.
        query_characters: additional characters in the query of IRIs.
        is_reference: whether relative references match too.
        is_simple: whether hosts that are IP addresses in brackets are excluded.
    """
    unescaped = f"{_UNRESERVED}{_SUB_DELIMS}{iri_characters}"
    host_bracket = f"\\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\\.[{_UNRESERVED}{_SUB_DELIMS}:-]+)\\]"
    host = _repeated(unescaped) if is_simple else f"(?:{host_bracket}|{_repeated(unescaped)})"
    authority = f"(?:{_repeated(unescaped + ':')}@)?{host}(?::[0-9]*)?"
    path = _repeated(f"{unescaped}:@/")
    first_character = f"(?:[{unescaped}:@-]|{_PERCENT_ESCAPE})"
    absolute_path = f"/(?:/{authority}(?:/{path})?|{first_character}{path})?"
    query_and_fragment = (
        f"(?:\\?{_repeated(f'{unescaped}{query_characters}:@/?')})?(?:#{_repeated(f'{unescaped}:@/?')})?"
    )
    absolute_uri = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{absolute_path}|{first_character}{path})?"
    if not is_reference:
        return f"{absolute_uri}{query_and_fragment}"
    path_without_scheme = f"(?:[{unescaped}@-]|{_PERCENT_ESCAPE}){_repeated(f'{unescaped}@')}(?:/{path})?"
    return f"(?:{absolute_uri}|{absolute_path}|{path_without_scheme})?{query_and_fragment}"


# RFC 6570, without the operators that are reserved for extensions.
_VARIABLE_CHARACTER = f"(?:[A-Za-z0-9_]|{_PERCENT_ESCAPE})"
_TEMPLATE_VARIABLE = f"{_VARIABLE_CHARACTER}(?:\\.?{_VARIABLE_CHARACTER})*(?::[1-9][0-9]{{0,3}}|\\*)?"
_TEMPLATE_CHARACTERS = f"!#$&(-;=?-\\[\\]_a-z~{_UCS_CHARACTERS}{_PRIVATE_USE}"
_TEMPLATE_EXPRESSION = f"\\{{[+#./;?&]?{_TEMPLATE_VARIABLE}(?:,{_TEMPLATE_VARIABLE})*\\}}"
_URI_TEMPLATE = f"(?:[{_TEMPLATE_CHARACTERS}]|{_PERCENT_ESCAPE}|{_TEMPLATE_EXPRESSION})*"

# RFC 6901.
_JSON_POINTER = "(?:/[^/~]*(?:~[01][^/~]*)*)*"

SUPPORTED_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": f"(?:{_TIME}|{_SAME_DAY}|{_NEXT_DAY})",
    "date-time": f"(?:{_DATE_TIME})",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _IDN_EMAIL,
    "hostname": _HOST,
    "idn-hostname": _IDN_HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _uri("", "", is_reference=False),
    "uri-reference": _uri("", "", is_reference=True),
    "uri-template": _URI_TEMPLATE,
    "iri": _uri(_UCS_CHARACTERS, _PRIVATE_USE, is_reference=False),
    "iri-reference": _uri(_UCS_CHARACTERS, _PRIVATE_USE, is_reference=True),
    "json-pointer": _JSON_POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_JSON_POINTER})",
}
"""Regular expressions of the formats that a grammar can generate."""

_LONG_LABEL = _label(63).replace("{0,58}", "*")
_LONG_HOST = f"{_LONG_LABEL}(?:\\.{_LONG_LABEL})*"
SIMPLE_FORMATS: Mapping[str, tuple[str, int | None]] = {
    "time": (_TIME, None),
    "date-time": (f"{_DATE}[Tt]{_TIME}", None),
    "uri": (_uri("", "", is_reference=False, is_simple=True), None),
    "uri-reference": (_uri("", "", is_reference=True, is_simple=True), None),
    "iri": (_uri(_UCS_CHARACTERS, _PRIVATE_USE, is_reference=False, is_simple=True), None),
    "iri-reference": (_uri(_UCS_CHARACTERS, _PRIVATE_USE, is_reference=True, is_simple=True), None),
    "hostname": (_LONG_HOST, 63),
    "idn-hostname": (_LONG_HOST, 63),
    "email": (f"{_ATOM}+(?:\\.{_ATOM}+)*@{_LONG_HOST}", 63),
    "idn-email": (f"{_ATOM}+(?:\\.{_ATOM}+)*@{_LONG_HOST}", 63),
}
"""Format -> (smaller expression, maximum string length up to which all its matches are valid).

`languages` uses these expressions if the automaton of the exact expression is too large. Some valid values do
not match. If the maximum length is None, all matches are valid.
"""

UNSUPPORTED_FORMATS = frozenset({"regex"})
"""Formats of the standard for which no grammar is generated. Only values of enum and const are checked.

Formats that the standard does not define are annotations.
"""

_CHECKS: Mapping[str, Callable[[str], bool]] = {
    "time": format_checks.is_time,
    "date-time": format_checks.is_date_time,
    "email": format_checks.is_email,
    "idn-email": format_checks.is_idn_email,
    "hostname": format_checks.is_hostname,
    "idn-hostname": format_checks.is_idn_hostname,
    "regex": format_checks.is_regex,
}


@cache
def format_tree(name: str) -> RegexNode:
    """Return the expression of a supported format."""
    return parse_regex(SUPPORTED_FORMATS[name], search=False)


@cache
def simple_tree(name: str, max_count: int | None) -> RegexNode | None:
    """Return the expression of a format in `SIMPLE_FORMATS`.

    Returns None for other formats, or if some matches may be invalid.

    Args:
        name: the format.
        max_count: maximum length of the matches; None means unbounded.
    """
    expression, max_valid_length = SIMPLE_FORMATS.get(name, ("", 0))
    if max_valid_length is not None and (max_count is None or max_count > max_valid_length):
        return None
    return parse_regex(expression, search=False)


@cache
def _compiled_pattern(name: str) -> re.Pattern[str]:
    return re.compile(SUPPORTED_FORMATS[name])


def has_format(name: str, value: str) -> bool:
    """Return whether a string has a format. Formats that the standard does not define accept all strings."""
    if name in _CHECKS:
        return _CHECKS[name](value)
    return name not in SUPPORTED_FORMATS or full_match(_compiled_pattern(name), value)
