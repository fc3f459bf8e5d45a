"""One folder a model family, named by its Hugging Face ``model_type`` (``-`` and ``.`` become ``_``).

The folder is the registration: its ``__init__.py`` holds ``ARCHITECTURE``, a `SupportedArchitecture`, and
loads no torch; ``config.py`` reads the checkpoint's values, ``model.py`` is the network.
"""
