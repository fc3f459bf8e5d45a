"""Formats of strings, as regular expressions that match nothing which is not of the format."""

from __future__ import annotations

_MONTHS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_LEAP = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000
_DATE = f"(?:{_YEAR}-{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP})"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"
_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_LABEL = "[A-Za-z0-9]{1,16}(?:-[A-Za-z0-9]{1,16})?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,4}}"

SUPPORTED = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,9}[DW]|T[0-9]{1,9}[HMS]|[0-9]{1,9}DT[0-9]{1,9}[HMS])",
    "email": f"[A-Za-z0-9_+-]{{1,20}}(?:\\.[A-Za-z0-9_+-]{{1,20}})?@{_LABEL}(?:\\.{_LABEL}){{1,4}}",
    "hostname": _HOST,
    "ipv4": f"{_BYTE}(?:\\.{_BYTE}){{3}}",
    "ipv6": "[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}",
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": f"https?://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~-]*)*"
    "(?:\\?[A-Za-z0-9._~&=-]*)?(?:#[A-Za-z0-9._~-]*)?",
}

UNSUPPORTED = frozenset(
    "idn-email idn-hostname uri-reference uri-template iri iri-reference json-pointer relative-json-pointer"
    " regex".split()
)
"""What the standard defines besides. Any other format is only a remark, as the standard has it."""
