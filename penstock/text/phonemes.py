"""Converts texts to phonemes with the program ``espeak-ng`` or ``espeak``."""

from __future__ import annotations

import re
import shutil
import subprocess

from penstock.errors import RequestFailedError, UnsupportedFeatureError

PROGRAMS = ("espeak-ng", "espeak")
_PUNCTUATION = re.compile(r"(\s*[;:,.!?¡¿—…\"«»“”(){}\[\]]+\s*)")
_TIMEOUT = 20.0  # seconds for a segment between punctuation marks
# espeak-ng encloses words of other languages in language names: (fr)...(en-us).
_LANGUAGE_NAMES = re.compile(r"\([a-z-]+\)")


def phonemize(text: str, language: str) -> str:
    """Return the phonemes of a text in the International Phonetic Alphabet, with stress and punctuation.

    Raises:
        UnsupportedFeatureError: neither espeak-ng nor espeak is installed.
        RequestFailedError: the program failed or took more than 20 s for a segment between punctuation marks.
    """
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise UnsupportedFeatureError(
            "text for a model that reads phonemes",
            "espeak-ng is not installed: install it (apt-get install espeak-ng), or give the prompt as token "
            'ids; if the model reads letters instead, set "phonemes": false in speech_config.json',
        )
    segments = _PUNCTUATION.split(text)
    segments_with_words = [segment for segment in segments[::2] if segment.strip()]
    phonemes = iter(_run_espeak(program, language, segments_with_words) if segments_with_words else [])
    results = [
        (next(phonemes) if segment.strip() else "") if index % 2 == 0 else segment
        for index, segment in enumerate(segments)
    ]
    return "".join(results).strip()


def _run_espeak(program: str, language: str, texts: list[str]) -> list[str]:
    """Return the phonemes of each text."""
    command = [program, "-q", "--ipa", "-v", language, "--stdin", "-b", "1"]
    phonemes = []
    for text in texts:
        try:
            result = subprocess.run(
                command, input=text.encode(), capture_output=True, timeout=_TIMEOUT, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RequestFailedError(f"{program} failed for language {language!r}: {error}") from error
        phonemes.append(" ".join(_LANGUAGE_NAMES.sub("", result.stdout.decode()).split()))
    return phonemes
