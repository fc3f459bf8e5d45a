"""The speech formats, one module each: ``FORMAT`` is a subclass of `SpeechFormat`."""
