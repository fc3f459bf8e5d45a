"""The training of `demo-vision`: pictures of shapes, questions about them, and a small SmolVLM."""
