"""`LoRAManager`: which adapters there are, which request uses which content, and who may run now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.config import LoRAConfig
from penstock.errors import InputError, UnknownModelError
from penstock.kernels import LoRAInputs
from penstock.lora.adapter import Adapter, Layers, read_adapter, warn_of_another_base
from penstock.lora.slots import AdapterSlots
from penstock.pipelines.core import InputContext
from penstock.weights import Weights

PATIENCE = 64
"""How often a request for another adapter is passed over before nobody else is let in until it runs."""


@dataclass(slots=True)
class _Use:
    """What a request uses, from the first time it is asked for until the request is released."""

    context: InputContext
    adapter: Adapter
    is_admitted: bool = False
    num_refusals: int = 0


class LoRAManager:
    """Holds adapters by name, lets no more of them run at once than there are slots, and lays out a batch.

    A request keeps the content that its adapter's name stood for when it was first looked at, also while it
    is preempted, until it is released: loading another content under that name, or unloading it, changes
    nothing for it. Its cached blocks are known by the digest of that content, so contents never mix.

    All is called by the thread that runs the steps, but `load`, `unload` and `names`, which any thread may
    call: a load reads and checks everything before it changes anything, in one assignment.

    Args:
        config: how many adapters may be loaded and run, and how large they may be.
        layers: the linear layers of the base model by their names in the checkpoint.
        base: the tensors of the base model.
        model_names: what the base model is called: no adapter may be.
        dtype: the type of the activations.
        device: where the matrices of the adapters that run are kept.

    Raises:
        PenstockError: an adapter of ``config.lora`` cannot be loaded, as from `load`.
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
    ) -> None:
        self._config, self._layers, self._base = config, layers, base
        self._model_names = tuple(model_names)
        self._dtype, self._device = dtype, device
        self._loaded: dict[str, Adapter] = {}
        self._slots = AdapterSlots(config.max_loras, config.max_lora_rank, layers, dtype, device)
        self._uses: dict[str, _Use] = {}  # by request id
        self._running: Counter[bytes] = Counter()  # digest -> admitted requests that use it
        for name, path in config.adapters:
            self.load(name, path)

    # -- Adapters by name -------------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Loads a PEFT directory under a name, in place of what was loaded under it; all of it or nothing.

        Raises:
            InputError: the name cannot be used, or as many adapters are loaded as may be.
            CheckpointError: the directory is missing or damaged, or does not fit the model.
            UnsupportedFeatureError: it is an adapter of a kind that cannot be applied.
        """
        self._check_name(name)
        most = self._config.max_loaded_loras
        if name not in self._loaded and len(self._loaded) >= most:
            raise InputError(
                f"{len(self._loaded)} adapters are loaded, and there may be {most}: unload one, or raise "
                "--max-loaded-loras"
            )
        adapter = read_adapter(path, self._layers, self._base, self._dtype, self._config.max_lora_rank)
        warn_of_another_base(path, self._model_names[0])
        self._loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Forgets an adapter; requests that use it go on to their end.

        Raises:
            UnknownModelError: there is none of this name.
        """
        if self._loaded.pop(name, None) is None:
            raise UnknownModelError(name, list(self._loaded))

    def names(self) -> list[tuple[str, str]]:
        """Name and path of each adapter that is loaded."""
        return [(name, adapter.path) for name, adapter in list(self._loaded.items())]

    # -- Requests ---------------------------------------------------------------------------------------

    def digest(self, context: InputContext) -> bytes:
        """Stands for the content that a request's adapter has: part of the identity of its cached blocks.

        Raises:
            UnknownModelError: there is no adapter of the name that the request gives.
        """
        return self._use(context).adapter.digest

    def ready(self, context: InputContext) -> bool:
        """Whether a request may run: where it may, room is kept for its adapter until it is released.

        Requests for adapters that run already may pass one that waits for room, but not for ever: passed
        over often enough, it is the next to be let in.

        Raises:
            UnknownModelError: there is no adapter of the name that the request gives.
        """
        if context.adapter is None:
            return True
        use = self._use(context)
        if use.is_admitted:
            return True
        digest = use.adapter.digest
        has_room = digest in self._running or len(self._running) < self._config.max_loras
        overtakes = use.num_refusals < PATIENCE and any(
            other.num_refusals >= PATIENCE and not other.is_admitted for other in self._uses.values()
        )
        if not has_room or overtakes:
            use.num_refusals += 1
            return False
        use.is_admitted = True
        self._running[digest] += 1
        return True

    def release(self, context: InputContext) -> None:
        """Forgets a request; twice is once."""
        use = self._uses.get(context.request_id)
        if use is None or use.context is not context:
            return
        del self._uses[context.request_id]
        if use.is_admitted:
            digest = use.adapter.digest
            self._running[digest] -= 1
            if not self._running[digest]:
                del self._running[digest]

    def check(self, contexts: Sequence[InputContext]) -> None:
        """Refuses a batch that cannot run together.

        Raises:
            UnknownModelError: there is no adapter of a name that a request gives.
            InputError: they use more adapters than there are slots.
        """
        used = {self.digest(context) for context in contexts if context.adapter is not None}
        if len(used) > self._config.max_loras:
            raise InputError(
                f"the batch uses {len(used)} adapters, and {self._config.max_loras} may run at once: split "
                "it, or raise --max-loras"
            )

    def inputs(self, contexts: Sequence[InputContext], counts: np.ndarray) -> LoRAInputs | None:
        """The adapters of a batch whose contexts have ``counts [B]`` rows each; None if none is used."""
        chosen = [None if context.adapter is None else self._use(context).adapter for context in contexts]
        adapters = {adapter.digest: adapter for adapter in chosen if adapter is not None}
        if not adapters:
            return None
        slots = self._slots.place(adapters, keep=self._running)
        indices = np.array([-1 if adapter is None else slots[adapter.digest] for adapter in chosen])
        rows = torch.from_numpy(indices.repeat(counts)).to(self._device)
        return LoRAInputs(rows, self._slots.matrices, self._slots.ranks)

    def _use(self, context: InputContext) -> _Use:
        use = self._uses.get(context.request_id)
        if use is not None and use.context is context:
            return use
        assert context.adapter is not None, f"{context.request_id} uses no adapter"
        adapter = self._loaded.get(context.adapter)
        if adapter is None:
            raise UnknownModelError(context.adapter, [*self._model_names, *self._loaded])
        if use is not None:  # another request of the same id that was not released
            self.release(use.context)
        use = self._uses[context.request_id] = _Use(context, adapter)
        return use

    def _check_name(self, name: str) -> None:
        if not name or name != name.strip() or not name.isprintable() or len(name) > 256:
            raise InputError(f"an adapter cannot be called {name!r}: use up to 256 printable characters")
        if name in self._model_names:
            raise InputError(f"an adapter cannot be called {name!r}: that is the base model")
