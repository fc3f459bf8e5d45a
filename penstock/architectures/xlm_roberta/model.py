"""XLM-RoBERTa (Conneau et al. 2020, arXiv:1911.02116): RoBERTa with a multilingual vocabulary."""

from __future__ import annotations

from penstock.architectures.roberta.model import RobertaModel


class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa as a pipeline model."""
