"""Images in prompts, and audio files: decoding, limits, processors and the tokens that they become.

No module of this package imports torch or transformers. Image processors, which need both, run in processes
of their own (`penstock.media.processor`)."""
