"""Phonemes of texts, from the program ``espeak-ng``."""

from __future__ import annotations

import re
import shutil
import subprocess

from penstock.errors import RequestFailedError, UnsupportedFeatureError

PROGRAMS = ("espeak-ng", "espeak")
_PUNCTUATION = re.compile(r"(\s*[;:,.!?¡¿—…\"«»“”(){}\[\]]+\s*)")
_TIMEOUT = 20.0
_FLAGS = re.compile(r"\([a-z-]+\)")  # espeak marks words of other languages: (fr)...(en-us)


def phonemes_of(text: str, language: str) -> str:
    """Return the phonemes of a text in the International Phonetic Alphabet, with stress and punctuation.

    Raises:
        UnsupportedFeatureError: the program is not installed.
        RequestFailedError: the program fails.
    """
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise UnsupportedFeatureError(
            "text for a model that reads phonemes",
            "espeak-ng is not installed: install it (apt-get install espeak-ng), or give the prompt as token "
            'ids; for a model that reads letters, write "phonemes": false to speech_config.json',
        )
    pieces = _PUNCTUATION.split(text)
    spoken = [piece for piece in pieces[::2] if piece.strip()]
    lines = iter(_run(program, language, spoken) if spoken else [])
    parts = [
        (next(lines) if piece.strip() else "") if index % 2 == 0 else piece
        for index, piece in enumerate(pieces)
    ]
    return "".join(parts).strip()


def _run(program: str, language: str, texts: list[str]) -> list[str]:
    """Return the phonemes of each text."""
    command = [program, "-q", "--ipa", "-v", language, "--stdin", "-b", "1"]
    lines = []
    for text in texts:
        try:
            result = subprocess.run(
                command, input=text.encode(), capture_output=True, timeout=_TIMEOUT, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RequestFailedError(f"{program} failed for language {language!r}: {error}") from error
        lines.append(" ".join(_FLAGS.sub("", result.stdout.decode()).split()))
    return lines
