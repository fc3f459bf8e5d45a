"""The training of the model `demo-vision`: pictures of shapes, questions about them, a small SmolVLM."""
