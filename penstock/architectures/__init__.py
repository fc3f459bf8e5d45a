"""Model families, one folder per family.

The name of a folder is the Hugging Face ``model_type``, with ``_`` in place of ``-`` and ``.``. The folder's
``__init__.py`` defines ``ARCHITECTURE``, a `SupportedArchitecture`, or ``ARCHITECTURES``, a tuple of them. It
does not import torch. The other modules define the pipeline models.
"""
