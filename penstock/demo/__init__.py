"""The embedded demo model (``--model demo``): weights, tokenizer, chat template and model card.

The folder is data in the layout of a Hugging Face checkpoint; ``tools/train_demo_model.py`` makes it. The
folder ``voice`` is the model ``demo-voice``; ``tools/train_demo_voice.py`` makes it. The folder
``vision`` is the model ``demo-vision``; ``tools/train_demo_vision.py`` makes it. This is a package only so
that it is installed with the code and found by ``importlib``.
"""
