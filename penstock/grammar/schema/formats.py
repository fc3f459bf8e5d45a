"""String formats: an expression for grammars, and a check of values, for each format.

An expression matches only values of the format. If the whole format would need too large a grammar, the
expression excludes the values that the comments name; `has_format` accepts them.
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

_MONTHS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_LEAP = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29"
_LEAP_CENTURY = "(?:0[48]|[2468][048]|[13579][26])00-02-29"
_YEAR = (
    "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000, which Python's dates do not support
)
_DATE = f"(?:{_YEAR}-{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}|{_LEAP_CENTURY})"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = "(?:\\.[0-9]+)?"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-]{_HOUR_MINUTE})"


def _leap_seconds() -> tuple[str, str]:
    """Return expressions of leap seconds, local times equal to 23:59:60 UTC: on the UTC day and on the next
    day. Offsets are multiples of half an hour."""
    same = [f"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"]
    following = [f"{hour:02}:29:60{_FRACTION}\\+{hour:02}:30" for hour in range(24)]
    for hour in range(23):
        same.append(f"{hour:02}:59:60{_FRACTION}-{23 - hour:02}:00")
        following.append(f"{hour:02}:59:60{_FRACTION}\\+{hour + 1:02}:00")
    same += [f"{hour:02}:29:60{_FRACTION}-{23 - hour:02}:30" for hour in range(24)]
    return "|".join(same), "|".join(following)


_SAME_DAY, _NEXT_DAY = _leap_seconds()
_DATE_TIME = (
    f"{_DATE}[Tt]{_TIME}|{_YEAR}-(?:(?:06-30|12-31)[Tt](?:{_SAME_DAY})|(?:07-01|01-01)[Tt](?:{_NEXT_DAY}))"
)

# RFC 3339, appendix A.
_DAYS = "(?:[0-9]+D)"
_MONTHS_DAYS = f"(?:[0-9]+M{_DAYS}?)"
_CLOCK = "T(?:[0-9]+(?:H(?:[0-9]+M(?:[0-9]+S)?)?|M(?:[0-9]+S)?|S))"
_CALENDAR = f"[0-9]+(?:Y{_MONTHS_DAYS}?|M{_DAYS}?|D)"
_DURATION = f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

# -- Addresses -------------------------------------------------------------------------------------------

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6(groups: int) -> str:
    """Return IPv6 addresses (RFC 4291, 2.2) with at most ``groups`` groups next to ``::``."""

    def more(left: int) -> str:
        """Return the expression after a group that follows ``::``."""
        if left == 0:
            return ""
        options = f"{_GROUP}{more(left - 1)}" + (f"|{_IPV4}" if left >= 2 else "")
        return f"(?::(?:{options}))?"

    def shortened(left: int) -> str:
        """Return the expression after ``::``."""
        if left == 0:
            return ""
        return f"(?:{_GROUP}{more(left - 1)}" + (f"|{_IPV4}" if left >= 2 else "") + ")?"

    def after(count: int) -> str:
        """Return the expression after ``count`` groups at the start."""
        if count == 8:
            return ""
        options = [f"{_GROUP}{after(count + 1)}"]
        if count <= groups:
            options.append(f":{shortened(groups - count)}")
        if count == 6:
            options.append(_IPV4)
        return f":(?:{'|'.join(options)})"

    return f"(?:::{shortened(groups)}|{_GROUP}{after(1)})"


_IPV6 = _ipv6(7)


def _label(max_count: int) -> str:
    """Return a label of a host name (RFC 1123) without hyphens at both positions 3 and 4 (RFC 5891)."""
    return (
        "[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9]"
        f"|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{{0,{max_count - 5}}}[A-Za-z0-9])?"
    )


# Excluded: valid names (at most 253 characters) whose labels are longer than all of these combinations.
_HOST = (
    f"(?:{_label(63)}(?:\\.{_label(63)}){{0,2}}(?:\\.{_label(61)})?"
    f"|{_label(63)}(?:\\.{_label(26)}){{0,7}}|{_label(15)}(?:\\.{_label(15)}){{0,14}})"
)
_MAIL_HOST = (  # 189 characters, so that an address has at most 254 (RFC 5321, 4.5.3.1.3)
    f"(?:{_label(63)}(?:\\.{_label(62)}){{0,2}}|{_label(63)}(?:\\.{_label(17)}){{0,7}}"
    f"|{_label(15)}(?:\\.{_label(15)}){{0,10}})"
)
_LITERAL = f"\\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_ipv6(6)})\\]"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
# Excluded: local parts of more than 32 characters with several dots that are longer than all of these.
_LOCAL = f"(?:{_ATOM}{{1,64}}|{_ATOM}(?:\\.?{_ATOM}){{0,31}}|{_ATOM}{{1,31}}\\.{_ATOM}{{1,32}})"
_QUOTED = '"(?:[ !#-\\[\\]-~]|\\\\[ -~]){0,31}"'  # of at most 64 characters
_EMAIL = f"(?:{_LOCAL}|{_QUOTED})@(?:{_MAIL_HOST}|{_LITERAL})"

# Letters of many scripts that IDNA 2008 allows without conditions. All others are excluded.
_LETTERS = (
    "\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c1\u03c3-\u03ce\u0430-\u045f\u0561-\u0586\u0905-\u0939\u0e01-\u0e2e\u0e40-\u0e44"
    "\u10d0-\u10f0\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_MARKS = "\u093e-\u094d\u0e30-\u0e32\u0e34-\u0e3a\u0e45-\u0e4e"  # cannot begin a label
_RIGHT_TO_LEFT = "\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u067e\u0686\u0698\u06a9\u06af\u06cc"
_MIXED = f"[{_LETTERS}][a-z0-9]{{0,4}}(?:-[a-z0-9]{{1,4}})?"
_ONE = f"(?:[a-z0-9]{{1,16}}-?)?[{_LETTERS}][a-z0-9]{{0,16}}(?:-[a-z0-9]{{1,14}})?"
_U_LABEL = (  # of at most 63 octets in its ASCII form
    f"(?:[a-z0-9{_LETTERS}][a-z0-9{_LETTERS}{_MARKS}]{{0,8}}[{_LETTERS}{_MARKS}]"
    f"|(?:[a-z0-9]{{1,8}}-?)?{_MIXED}(?:-?{_MIXED}){{0,2}}|{_ONE}|[{_RIGHT_TO_LEFT}]{{1,10}})"
)
_IDN_LABEL = f"(?:{_label(63)}|{_U_LABEL})"
_IDN_HOST = f"(?:{_HOST}|{_IDN_LABEL}(?:\\.{_IDN_LABEL}){{0,2}})"
_IDN_ATOM = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_LETTERS}-]"
_IDN_EMAIL = (
    f"(?:{_EMAIL}|(?:{_IDN_ATOM}{{1,21}}|{_IDN_ATOM}{{1,10}}\\.{_IDN_ATOM}{{1,10}})"
    f"@{_IDN_LABEL}(?:\\.{_IDN_LABEL}){{0,1}})"
)

# -- URIs (RFC 3986) and IRIs (RFC 3987) -----------------------------------------------------------------

_UNRESERVED = "A-Za-z0-9._~"  # and -, which goes last in a class
_SUB_DELIMS = "!$&'()*+,;="
_ESCAPED = "%[0-9A-Fa-f]{2}"
# Excludes the directional marks, which RFC 3987 forbids.
_UCS = (
    "\u00a0-\u200d\u2010-\u2029\u202f-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + f"{chr(0xE1000)}-{chr(0xEFFFD)}"
)
_PRIVATE = f"\ue000-\uf8ff{chr(0xF0000)}-{chr(0xFFFFD)}{chr(0x100000)}-{chr(0x10FFFD)}"


def _some(characters: str) -> str:
    """Return any number of these characters and of percent-encoded ones."""
    return f"[{characters}-]*(?:{_ESCAPED}[{characters}-]*)*"


def _uri(more: str, in_query: str, *, is_reference: bool, is_simple: bool = False) -> str:
    """Return URIs. ``more`` and ``in_query`` are additional characters of IRIs, everywhere or in the query.

    Simple URIs have no address in brackets.
    """
    plain = f"{_UNRESERVED}{_SUB_DELIMS}{more}"
    host_bracket = f"\\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\\.[{_UNRESERVED}{_SUB_DELIMS}:-]+)\\]"
    host = _some(plain) if is_simple else f"(?:{host_bracket}|{_some(plain)})"
    authority = f"(?:{_some(plain + ':')}@)?{host}(?::[0-9]*)?"
    path = _some(f"{plain}:@/")
    first = f"(?:[{plain}:@-]|{_ESCAPED})"
    rooted = f"/(?:/{authority}(?:/{path})?|{first}{path})?"
    tail = f"(?:\\?{_some(f'{plain}{in_query}:@/?')})?(?:#{_some(f'{plain}:@/?')})?"
    absolute = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{rooted}|{first}{path})?"
    if not is_reference:
        return f"{absolute}{tail}"
    no_scheme = f"(?:[{plain}@-]|{_ESCAPED}){_some(f'{plain}@')}(?:/{path})?"
    return f"(?:{absolute}|{rooted}|{no_scheme})?{tail}"


# RFC 6570, without the operators that are reserved for extensions.
_VARIABLE = f"(?:[A-Za-z0-9_]|{_ESCAPED})(?:\\.?(?:[A-Za-z0-9_]|{_ESCAPED}))*(?::[1-9][0-9]{{0,3}}|\\*)?"
_IN_TEMPLATE = f"!#$&(-;=?-\\[\\]_a-z~{_UCS}{_PRIVATE}"
_TEMPLATE = f"(?:[{_IN_TEMPLATE}]|{_ESCAPED}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"

# RFC 6901.
_POINTER = "(?:/[^/~]*(?:~[01][^/~]*)*)*"

SUPPORTED: Mapping[str, str] = {
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
    "uri-template": _TEMPLATE,
    "iri": _uri(_UCS, _PRIVATE, is_reference=False),
    "iri-reference": _uri(_UCS, _PRIVATE, is_reference=True),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Regular expressions of the formats that a grammar can generate."""

_LONG_LABEL = _label(63).replace("{0,58}", "*")
_LONG_HOST = f"{_LONG_LABEL}(?:\\.{_LONG_LABEL})*"
SIMPLE: Mapping[str, tuple[str, int | None]] = {
    "time": (_TIME, None),
    "date-time": (f"{_DATE}[Tt]{_TIME}", None),
    "uri": (_uri("", "", is_reference=False, is_simple=True), None),
    "uri-reference": (_uri("", "", is_reference=True, is_simple=True), None),
    "iri": (_uri(_UCS, _PRIVATE, is_reference=False, is_simple=True), None),
    "iri-reference": (_uri(_UCS, _PRIVATE, is_reference=True, is_simple=True), None),
    "hostname": (_LONG_HOST, 63),
    "idn-hostname": (_LONG_HOST, 63),
    "email": (f"{_ATOM}+(?:\\.{_ATOM}+)*@{_LONG_HOST}", 63),
    "idn-email": (f"{_ATOM}+(?:\\.{_ATOM}+)*@{_LONG_HOST}", 63),
}
"""Smaller expressions of most values of a format, for grammars that combine it with other bounds. Each is
valid up to a given string length.
"""

UNSUPPORTED = frozenset({"regex"})
"""Further formats of the standard, tested only on values of enum and const. Other names are annotations."""

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
    return parse_regex(SUPPORTED[name], search=False)


@cache
def simple_tree(name: str, max_count: int | None) -> RegexNode | None:
    """Return a smaller expression of a format for strings up to a length; None if there is none."""
    expression, longest = SIMPLE.get(name, ("", 0))
    if longest is not None and (max_count is None or max_count > longest):
        return None
    return parse_regex(expression, search=False)


@cache
def _compiled(name: str) -> re.Pattern[str]:
    return re.compile(SUPPORTED[name])


def has_format(name: str, value: str) -> bool:
    """Return whether a string has a format. Formats that the standard does not define accept all strings."""
    if name in _CHECKS:
        return _CHECKS[name](value)
    return name not in SUPPORTED or full_match(_compiled(name), value)
