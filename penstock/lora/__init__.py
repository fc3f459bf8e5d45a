"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): read from PEFT directories, many in one batch.

`adapter_config` and `adapter` read them, `slots` keeps those that run on the device, `manager` decides
which these are.
"""

from __future__ import annotations

from penstock.lora.adapter import Adapter, read_adapter
from penstock.lora.manager import LoRAManager

__all__ = ["Adapter", "LoRAManager", "read_adapter"]
