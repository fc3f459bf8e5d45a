"""The speech formats, one module each: ``FORMAT`` is a `penstock.text.speech_format.SpeechFormat`."""
