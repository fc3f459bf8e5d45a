"""The included models: ``demo`` in this folder, ``demo-voice`` in ``voice``, ``demo-vision`` in ``vision``.

Each folder is a Hugging Face checkpoint with weights, tokenizer and model card. The models are trained by
``tools/train_demo_model.py``, ``tools/train_demo_voice.py`` and ``tools/train_demo_vision.py``. The folder is
a Python package, so that the checkpoints are installed with the code and ``importlib`` finds them.
"""
