"""Weight bytes of a checkpoint from its safetensors headers, without loading tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from ....quant.base.errors import BadInput
from ....quant.model.checkpoint import INDEX_NAME, read_json

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def stored_weight_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in a folder, without headers and padding; None if it has no weights.

    Raises:
        BadInput: a shard that the index names is missing, or a header is damaged.
    """
    if (index := folder / INDEX_NAME).is_file():
        shards = sorted(set((read_json(index).get("weight_map") or {}).values()))
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    return sum(_tensor_bytes(folder / shard) for shard in shards) or None


def _tensor_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header has no sensible length")
            header = json.loads(file.read(length))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return sum(stop - start for start, stop in spans)
    except FileNotFoundError as error:
        raise BadInput(f"{path} is missing: the checkpoint is incomplete") from error
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is cut off or damaged ({error}): fetch or write it again"
        ) from error
