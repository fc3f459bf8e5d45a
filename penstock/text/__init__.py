"""Text to tokens and back: tokenizers, chat templates and incremental detokenization. Loads no torch."""
