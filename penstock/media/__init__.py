"""Images in prompts and audio files: decoders, limits, image processors and image tokens.

No module of this package imports torch or transformers. Image processors need both and run in separate
processes (`penstock.media.processor`)."""
