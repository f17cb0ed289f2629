"""LoRA adapters that are loaded and unloaded while the engine runs (vLLM's LoRA manager)."""

from __future__ import annotations

from pathlib import Path

import torch

from ...base.errors import BadInput
from ..config.adapters import LoadedAdapters
from ..config.config import EngineConfig
from ..model.adapter.open import CausalModel
from ..model.layers.lora import AdapterBank, AdapterParts
from ..scheduling.scheduler import Scheduler


class LoraManager:
    """Loads and unloads adapters between two steps, on the thread that drives the engine. A request keeps the
    weights that it began with: those of an unloaded adapter are freed once no request uses them. The KV
    cache's budget does not count what is loaded later into no slot."""

    def __init__(self, config: EngineConfig, model: CausalModel, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler
        self.loaded = LoadedAdapters(config.loras, config.max_loras)

    @property
    def releasable(self) -> set[str]:
        if not (retired := self.loaded.retired):
            return retired
        return retired - {request.lora for request in self._scheduler.requests()}

    def read(self, folder: Path) -> AdapterParts:
        """Read an adapter's weights onto the device, on any thread. BadInput: it does not fit."""
        try:
            return self._bank.read(folder)
        except torch.OutOfMemoryError as error:
            raise BadInput(f"{folder}: its weights do not fit on the device now") from error

    def load(
        self, name: str, folder: Path, parts: AdapterParts, *, load_inplace: bool = False
    ) -> None:
        """Serve an adapter that was read, between steps. BadInput: name taken, or `max_loras` reached."""
        key = self.loaded.add(name, load_inplace=load_inplace)
        self._bank.attach(key, parts)
        if self._model.broadcast is not None:
            self._model.broadcast("load_lora", (key, folder))
        self.release()

    def unload(self, name: str) -> None:
        """Serve an adapter to no new request, between steps. BadInput: it is not loaded."""
        self.loaded.remove(name)
        self.release()

    def release(self) -> None:
        """Free the weights of unloaded adapters that no request uses; no step may be in flight."""
        for key in self.releasable:
            self._bank.detach(key)
            if self._model.broadcast is not None:
                self._model.broadcast("unload_lora", key)
            self.loaded.retired.discard(key)

    @property
    def _bank(self) -> AdapterBank:
        if self._model.lora_bank is None:
            raise BadInput("this engine takes no LoRA adapters: start it with max_loras")
        return self._model.lora_bank
