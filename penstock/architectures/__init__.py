"""Model families. Each has a folder with the name of its Hugging Face ``model_type``.

In the folder's name ``-`` and ``.`` become ``_``. The registry discovers the folder; no other list is needed.
Its ``__init__.py`` defines ``ARCHITECTURE``, a `SupportedArchitecture`, and loads no torch. The network is in
``model.py``.
"""
