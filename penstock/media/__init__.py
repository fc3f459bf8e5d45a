"""Audio files, and images in prompts: decoders, limits, image processors and image tokens.

Importing these modules imports neither torch nor transformers. Image processors need both, so the server runs
them in separate processes (`penstock.media.processor`)."""
