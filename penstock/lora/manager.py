"""`LoRAManager`: loads adapters, assigns them to requests, and limits the number of running adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from penstock.config import LoRAConfig
from penstock.errors import InputError, UnknownModelError
from penstock.kernels import LoRAInputs, upload
from penstock.lora.adapter import Adapter, Layers, Parts, Rename, read_adapter, warn_base_model_mismatch
from penstock.lora.slots import AdapterSlots
from penstock.pipelines.core import InputContext
from penstock.weights import Weights

MAX_SKIPS = 64
"""Number of refusals by `ready` after which a request is not overtaken by requests with fewer refusals."""


@dataclass(slots=True)
class _AdapterUse:
    """The adapter of a request, kept until the request is released."""

    context: InputContext
    adapter: Adapter
    is_admitted: bool = False
    num_skips: int = 0


class LoRAManager:
    """Stores adapters by name, limits running adapters to the number of slots, and prepares batch inputs.

    The name of a request's adapter is resolved once, at first use. The request uses the content of this
    adapter until its release, even if the name is unloaded or loaded again. The digest of the content is
    hashed into the digests of the request's KV blocks, so requests with different contents never share
    blocks.

    Any thread may call `load`, `unload` and `names`. `load` first checks the adapter and then changes the
    state in one assignment. All other methods may be called only by the thread that runs the steps.

    Args:
        config: the maximum number and the maximum rank of adapters.
        layers: the linear layers of the base model by their names in the checkpoint.
        base: the tensors of the base model.
        model_names: the names of the base model, which adapters cannot use.
        dtype: the type of the activations.
        device: where the matrices of running adapters are stored.
        rename: see `read_adapter`.
        parts: this rank's parts of the layers that are divided among ranks.
        task_adapters: the adapters of the checkpoint, by name. They are always loaded.
        is_rank_0: whether this process is rank 0, which loads adapters and assigns slots. Other ranks use the
            slots that rank 0 assigns.

    Raises:
        PenstockError: an adapter of ``config.adapters`` cannot be loaded; see `load`.
    """

    def __init__(
        self,
        config: LoRAConfig,
        layers: Layers,
        base: Weights,
        model_names: Iterable[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        rename: Rename | None = None,
        parts: Parts = MappingProxyType({}),
        task_adapters: Mapping[str, Adapter] = MappingProxyType({}),
        is_rank_0: bool = True,
    ) -> None:
        self._parts = parts
        self._config, self._layers, self._base, self._rename = config, layers, base, rename
        self._model_names = tuple(model_names)
        self._dtype, self._device = dtype, device
        self._tasks = task_adapters
        self._adapters_by_name: dict[str, Adapter] = dict(task_adapters)
        self._slots = AdapterSlots(config.max_loras, config.max_lora_rank, layers, dtype, device, parts)
        self._uses: dict[str, _AdapterUse] = {}  # by request id
        self._num_running_requests: Counter[bytes] = Counter()  # admitted requests, by digest of the adapter
        for name, path in config.adapters if is_rank_0 else ():
            self.load(name, path)

    # -- Adapters by name -------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Load the adapter in a PEFT directory under a name. Replaces an adapter of the same name.

        A failure changes nothing.

        Raises:
            InputError: the name cannot be used, or the maximum number of adapters is loaded.
            CheckpointError: the directory is missing or damaged, or its tensors do not fit the model.
            UnsupportedFeatureError: the kind of adapter is not supported.
        """
        self._check_name(name)
        limit = self._config.max_loaded_loras
        if name not in self._adapters_by_name and len(self._adapters_by_name) >= limit:
            raise InputError(
                f"{len(self._adapters_by_name)} adapters are loaded, and the maximum is {limit}: unload one, "
                "or raise --max-loaded-loras"
            )
        max_rank = self._config.max_lora_rank
        adapter = read_adapter(
            path, self._layers, self._base, self._dtype, max_rank, self._rename, self._parts
        )
        warn_base_model_mismatch(path, self._model_names[0])
        self._adapters_by_name[name] = adapter

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it continue.

        Raises:
            UnknownModelError: no adapter of this name is loaded.
            InputError: the adapter is a task adapter of the checkpoint.
        """
        if name in self._tasks:
            raise InputError(f"{name!r} is a task adapter of the checkpoint: it cannot be unloaded")
        if self._adapters_by_name.pop(name, None) is None:
            raise UnknownModelError(name, list(self._adapters_by_name))

    def names(self) -> list[tuple[str, str]]:
        """Return the name and path of each loaded adapter."""
        return [(name, adapter.path) for name, adapter in list(self._adapters_by_name.items())]

    # -- Requests ---------------------------------------------------------------------------------------

    def digest(self, context: InputContext) -> bytes:
        """Return the digest of a request's adapter, which is hashed into the digests of its KV blocks.

        Raises:
            UnknownModelError: the request's adapter is not loaded.
        """
        return self._adapter_use(context).adapter.digest

    def ready(self, context: InputContext) -> bool:
        """Return whether a request may run. If so, its adapter keeps a slot until the request is released.

        Other requests may overtake a request that waits for a slot, until `ready` has refused the waiting
        request `MAX_SKIPS` times. Requests without an adapter never wait.

        Raises:
            UnknownModelError: the request's adapter is not loaded.
        """
        if context.adapter is None:
            return True
        use = self._adapter_use(context)
        if use.is_admitted:
            return True
        digest = use.adapter.digest
        has_slot = (
            digest in self._num_running_requests or len(self._num_running_requests) < self._config.max_loras
        )
        overtakes = use.num_skips < MAX_SKIPS and any(
            waiting.num_skips >= MAX_SKIPS and not waiting.is_admitted for waiting in self._uses.values()
        )
        if not has_slot or overtakes:
            use.num_skips += 1
            return False
        use.is_admitted = True
        self._num_running_requests[digest] += 1
        return True

    def release(self, context: InputContext) -> None:
        """Release the slot of a request. Does nothing if it is released already."""
        use = self._uses.get(context.request_id)
        if use is None or use.context is not context:
            return
        del self._uses[context.request_id]
        if use.is_admitted:
            digest = use.adapter.digest
            self._num_running_requests[digest] -= 1
            if not self._num_running_requests[digest]:
                del self._num_running_requests[digest]

    def check(self, contexts: Sequence[InputContext]) -> None:
        """Check that the requests of a batch can run in one step.

        Raises:
            UnknownModelError: the adapter of a request is not loaded.
            InputError: the batch uses more adapters than there are slots.
        """
        used_adapters = {self.digest(context) for context in contexts if context.adapter is not None}
        if len(used_adapters) > self._config.max_loras:
            raise InputError(
                f"the batch uses {len(used_adapters)} adapters, and at most {self._config.max_loras} can run "
                "at once: split it, or raise --max-loras"
            )

    def inputs(self, contexts: Sequence[InputContext], row_counts: np.ndarray) -> LoRAInputs | None:
        """Put the adapters of a batch into slots, and return the adapter inputs of the batch.

        Returns None if no context uses an adapter.

        Args:
            contexts: the batch.
            row_counts: ``[B]``: the number of rows of each context in the step.
        """
        used_adapters = [
            None if context.adapter is None else self._adapter_use(context).adapter for context in contexts
        ]
        adapters = {adapter.digest: adapter for adapter in used_adapters if adapter is not None}
        if not adapters:
            return None
        slots = self._slots.assign(adapters, digests_to_keep=self._num_running_requests)
        indices = np.array([-1 if adapter is None else slots[adapter.digest] for adapter in used_adapters])
        rows = upload(indices.repeat(row_counts), self._device)
        return LoRAInputs(rows, self._slots.matrices, self._slots.ranks)

    # -- Slots of other ranks -----------------------------------------------------------------------------

    def on_put(self, call: Callable[[int, Mapping[str, tuple[Tensor, Tensor]]], None]) -> None:
        """Set a function to call as ``call(slot, matrices)`` before an adapter is put into a slot.

        ``matrices`` contains the matrices of whole layers, not of this rank's parts.
        """
        self._slots.on_put = lambda slot, adapter: call(slot, adapter.matrices)

    def put(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter that rank 0 has loaded into the slot that rank 0 has assigned."""
        self._slots.put(slot, matrices)

    def inputs_for_rows(self, rows: Tensor) -> LoRAInputs:
        """Return the adapter inputs of a batch; ``rows [T]`` has the slot of each row, or -1."""
        return LoRAInputs(rows, self._slots.matrices, self._slots.ranks)

    def _adapter_use(self, context: InputContext) -> _AdapterUse:
        """Return the record of a request's adapter. The first call resolves the adapter's name."""
        use = self._uses.get(context.request_id)
        if use is not None and use.context is context:
            return use
        assert context.adapter is not None, f"{context.request_id} uses no adapter"
        adapter = self._adapters_by_name.get(context.adapter)
        if adapter is None:
            raise UnknownModelError(context.adapter, [*self._model_names, *self._adapters_by_name])
        if use is not None:  # an earlier request with the same id was not released
            self.release(use.context)
        use = self._uses[context.request_id] = _AdapterUse(context, adapter)
        return use

    def _check_name(self, name: str) -> None:
        if not name or name != name.strip() or not name.isprintable() or len(name) > 256:
            raise InputError(f"an adapter cannot be named {name!r}: use up to 256 printable characters")
        if name in self._model_names:
            raise InputError(f"an adapter cannot be named {name!r}: that is the base model")
        if name in self._tasks:
            raise InputError(f"an adapter cannot be named {name!r}: that is a task adapter of the checkpoint")
