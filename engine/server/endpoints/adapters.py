"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM's: adapters while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from ....quant.adapters.settings import CONFIG_NAME
from ....quant.adapters.weights import WEIGHTS_NAME
from ...engine import Engine
from ..protocol.errors import ApiError
from ..protocol.server_options import ServerOptions
from .generation import Service

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}$")]


class LoadAdapterRequest(BaseModel):
    """Body of `/v1/load_lora_adapter`; `load_inplace` replaces an adapter of that name."""

    model_config = ConfigDict(extra="forbid")

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    """Body of `/v1/unload_lora_adapter`. vLLM's `lora_int_id` is accepted and not needed."""

    model_config = ConfigDict(extra="forbid")

    lora_name: AdapterName
    lora_int_id: int | None = None


def adapters_router(service: Service, engine: Engine, options: ServerOptions) -> APIRouter:
    """The endpoints, for a server that has folders of adapters."""
    router = APIRouter()
    changing = asyncio.Lock()

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest) -> str:
        """Load a LoRA adapter from a folder below --allowed-lora-path, and serve it as a model."""
        name = body.lora_name
        folder = allowed_folder(body.lora_path, options.lora_folders)
        async with changing:
            if name == service.model_name or (name in service.adapters and not body.load_inplace):
                raise ApiError(
                    400,
                    f"lora_name: {name!r} is served already: unload it first",
                    param="lora_name",
                )
            weights = await asyncio.to_thread(engine.loras.read, folder)
            await service.loop.run(
                lambda engine: engine.load_lora(
                    name, folder, weights, load_inplace=body.load_inplace
                )
            )
            service.adapters[name] = folder
        return f"Success: LoRA adapter '{name}' added successfully."

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> str:
        """Unload a LoRA adapter. Requests that use it go on with it to their end."""
        name = body.lora_name
        async with changing:
            if name not in service.adapters:
                raise ApiError(
                    404, f"no adapter {name!r}", param="lora_name", code="model_not_found"
                )
            await service.loop.run(lambda engine: engine.unload_lora(name))
            del service.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    return router


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """The folder of a request's path, which is relative to the first of `roots`, or absolute.

    Whether a path outside exists cannot be learnt. Links are followed before the check, those of the
    adapter's files too.

    Raises:
        ApiError: it is not below one of `roots`.
    """
    refusal = ApiError(400, "lora_path: not a folder below --allowed-lora-path", param="lora_path")
    try:
        folder = Path(roots[0], path).resolve()
        inside = [root.resolve() for root in roots]
        places = [folder, *((folder / name).resolve() for name in (CONFIG_NAME, WEIGHTS_NAME))]
    except (OSError, ValueError, RuntimeError) as error:
        raise refusal from error
    if not all(any(place.is_relative_to(root) for root in inside) for place in places):
        raise refusal
    if not folder.is_dir():
        raise refusal
    return folder
