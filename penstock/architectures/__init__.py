"""Model families. Each family has a folder. The registry finds the folder by its name.

The name is the Hugging Face ``model_type``, with ``_`` in place of ``-`` and ``.``. The folder's
``__init__.py`` defines ``ARCHITECTURE``, a `SupportedArchitecture`, and does not import torch. Its
``model.py`` defines the network.
"""
