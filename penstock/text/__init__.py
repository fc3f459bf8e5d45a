"""Tokenizers, chat templates and incremental detokenization. Importing this package does not import torch."""
