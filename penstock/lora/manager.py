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
"""Number of times that later requests may overtake a request waiting for a slot. After that, it is admitted
first.
"""


@dataclass(slots=True)
class _Use:
    """The adapter of a request, from its first use until the request is released."""

    context: InputContext
    adapter: Adapter
    is_admitted: bool = False
    num_skips: int = 0


class LoRAManager:
    """Holds adapters by name, limits running adapters to the number of slots, and prepares batch inputs.

    A request resolves the name of its adapter once, at first use. It uses the content of this adapter until
    it is released, even if the name is unloaded or loaded again. The digest of the content is the root of
    block hashes, so cached blocks of different contents never mix.

    Any thread may call `load`, `unload` and `names`. `load` checks everything first and then changes the
    state in one assignment. Only the thread that runs the steps may call the other methods.

    Args:
        config: the maximum number and the maximum rank of adapters.
        layers: the linear layers of the base model by their names in the checkpoint.
        base: the tensors of the base model.
        model_names: the names of the base model, which adapters cannot use.
        dtype: the type of the activations.
        device: where the matrices of running adapters are stored.
        rename: see `read_adapter`.
        parts: the layers that are divided among ranks.
        task_adapters: the adapters of the checkpoint, by name. They are always loaded.
        is_leader: whether this process is rank 0, which loads adapters and assigns slots. Other ranks use the
            slots that rank 0 assigns.

    Raises:
        PenstockError: an adapter of ``config.lora`` cannot be loaded; see `load`.
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
        is_leader: bool = True,
    ) -> None:
        self._parts = parts
        self._config, self._layers, self._base, self._rename = config, layers, base, rename
        self._model_names = tuple(model_names)
        self._dtype, self._device = dtype, device
        self._tasks = task_adapters
        self._adapters_by_name: dict[str, Adapter] = dict(task_adapters)
        self._slots = AdapterSlots(config.max_loras, config.max_lora_rank, layers, dtype, device, parts)
        self._uses: dict[str, _Use] = {}  # request id -> its adapter
        self._num_running_requests: Counter[bytes] = (
            Counter()
        )  # digest -> number of admitted requests that use it
        for name, path in config.adapters if is_leader else ():
            self.load(name, path)

    # -- Adapters by name -------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Load a PEFT directory under a name, and replace an adapter of that name. A failure has no effect.

        Raises:
            InputError: the name cannot be used, or the maximum number of adapters is loaded.
            CheckpointError: the directory is missing or damaged, or does not fit the model.
            UnsupportedFeatureError: the kind of adapter is not supported.
        """
        self._check_name(name)
        limit = self._config.max_loaded_loras
        if name not in self._adapters_by_name and len(self._adapters_by_name) >= limit:
            raise InputError(
                f"{len(self._adapters_by_name)} adapters are loaded, and the maximum is {limit}: unload one, "
                "or raise --max-loaded-loras"
            )
        limits = self._dtype, self._config.max_lora_rank
        adapter = read_adapter(path, self._layers, self._base, *limits, self._rename, self._parts)
        warn_base_model_mismatch(path, self._model_names[0])
        self._adapters_by_name[name] = adapter

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it continue.

        Raises:
            UnknownModelError: no adapter of this name is loaded.
            InputError: it is an adapter of the checkpoint.
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
        """Return the digest of a request's adapter, which is the root of the request's block hashes.

        Raises:
            UnknownModelError: the request's adapter is not loaded.
        """
        return self._use(context).adapter.digest

    def ready(self, context: InputContext) -> bool:
        """Return whether a request may run. An admitted request keeps its adapter's slot until its release.

        Requests whose adapters are running may overtake a request that waits for a slot, at most `MAX_SKIPS`
        times.

        Raises:
            UnknownModelError: the request's adapter is not loaded.
        """
        if context.adapter is None:
            return True
        use = self._use(context)
        if use.is_admitted:
            return True
        digest = use.adapter.digest
        has_slot = (
            digest in self._num_running_requests or len(self._num_running_requests) < self._config.max_loras
        )
        overtakes = use.num_skips < MAX_SKIPS and any(
            other.num_skips >= MAX_SKIPS and not other.is_admitted for other in self._uses.values()
        )
        if not has_slot or overtakes:
            use.num_skips += 1
            return False
        use.is_admitted = True
        self._num_running_requests[digest] += 1
        return True

    def release(self, context: InputContext) -> None:
        """Release the slot of a request. Calling it again has no effect."""
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
        """Check that a batch can run together.

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

    def inputs(self, contexts: Sequence[InputContext], counts: np.ndarray) -> LoRAInputs | None:
        """Return the adapter inputs of a batch, or None if no context uses an adapter.

        Args:
            contexts: the batch.
            counts: ``[B]`` number of rows of each context.
        """
        used_adapters = [
            None if context.adapter is None else self._use(context).adapter for context in contexts
        ]
        adapters = {adapter.digest: adapter for adapter in used_adapters if adapter is not None}
        if not adapters:
            return None
        slots = self._slots.assign(adapters, keep=self._num_running_requests)
        indices = np.array([-1 if adapter is None else slots[adapter.digest] for adapter in used_adapters])
        rows = upload(indices.repeat(counts), self._device)
        return LoRAInputs(rows, self._slots.matrices, self._slots.ranks)

    # -- Slots of other processes -------------------------------------------------------------------------

    def on_put(self, call: Callable[[int, Mapping[str, tuple[Tensor, Tensor]]], None]) -> None:
        """Call ``call(slot, whole matrices)`` before each assignment of an adapter to a slot."""
        self._slots.on_put = lambda slot, adapter: call(slot, adapter.matrices)

    def put(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter that the leader has loaded into the slot that the leader has chosen."""
        self._slots.put(slot, matrices)

    def inputs_for_rows(self, rows: Tensor) -> LoRAInputs:
        """Return the adapter inputs of a batch; ``rows [T]`` has the slot of each row, or -1."""
        return LoRAInputs(rows, self._slots.matrices, self._slots.ranks)

    def _use(self, context: InputContext) -> _Use:
        use = self._uses.get(context.request_id)
        if use is not None and use.context is context:
            return use
        assert context.adapter is not None, f"{context.request_id} uses no adapter"
        adapter = self._adapters_by_name.get(context.adapter)
        if adapter is None:
            raise UnknownModelError(context.adapter, [*self._model_names, *self._adapters_by_name])
        if use is not None:  # an earlier request with the same id was not released
            self.release(use.context)
        use = self._uses[context.request_id] = _Use(context, adapter)
        return use

    def _check_name(self, name: str) -> None:
        if not name or name != name.strip() or not name.isprintable() or len(name) > 256:
            raise InputError(f"an adapter cannot be named {name!r}: use up to 256 printable characters")
        if name in self._model_names:
            raise InputError(f"an adapter cannot be named {name!r}: that is the base model")
        if name in self._tasks:
            raise InputError(f"an adapter cannot be named {name!r}: that is a task adapter of the checkpoint")
