"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685), read from PEFT directories.

The requests of a batch can use different adapters.

`adapter_config` and `adapter` read adapters; `task_adapters` reads adapters that are part of a checkpoint.
`slots` holds the running adapters on the device, and `manager` decides which adapters run.
"""

from __future__ import annotations

from penstock.lora.adapter import Adapter, read_adapter
from penstock.lora.manager import LoRAManager
from penstock.lora.task_adapters import read_task_adapters

__all__ = ["Adapter", "LoRAManager", "read_adapter", "read_task_adapters"]
