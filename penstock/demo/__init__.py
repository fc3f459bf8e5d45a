"""The embedded demo model (``--model demo``): weights, tokenizer, chat template and model card.

The folder is data in the layout of a Hugging Face checkpoint; ``tools/train_demo_model.py`` makes
it.  It is a package only so that it is installed with the code and found by ``importlib``.
"""
