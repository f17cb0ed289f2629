"""A model of the hub by its headers alone: small files whole, files of tensors as holes of their size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ...base.errors import BadInput, reported_as
from .models import HUB_ID, hub_is_offline, resolve_model

_SMALL = re.compile(r"[^/]*\.(json|model|txt|jinja)")
_TENSORS = re.compile(r"[^/]*\.safetensors")
MOST_HEADER_BYTES = 100 << 20
"""Length of a header beyond which a file is none of safetensors (its reader has the same limit)."""


@contextmanager
def headers_of(name: str) -> Iterator[Path]:
    """The folder of a model for those who read headers alone; of a hub id it is temporary. Without network
    (HF_HUB_OFFLINE) it is the cache's. BadInput: as `resolve_model`, or a model without safetensors."""
    if hub_is_offline() or not HUB_ID.fullmatch(name) or Path(name).exists():
        yield resolve_model(name)
        return
    with TemporaryDirectory(prefix="llmopt-headers-") as folder:
        target = Path(folder) / name.rpartition("/")[2]
        refusal = f"model {name!r} is no folder here and the hub did not give it"
        with reported_as(refusal, keeping=BadInput):
            _fetch(name, target)
        yield target


def _fetch(hub_id: str, target: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    model = HfApi().model_info(hub_id, files_metadata=True)
    files = {file.rfilename: file.size for file in model.siblings or ()}
    if not any(map(_TENSORS.fullmatch, files)):
        raise BadInput(
            f"model {hub_id!r} of the hub has no .safetensors file: download what it has"
        )
    for file, size in files.items():
        if _TENSORS.fullmatch(file):
            _fetch_header(hub_id, model.sha, file, size or 0, target / file)
        elif _SMALL.fullmatch(file):
            hf_hub_download(hub_id, file, revision=model.sha, local_dir=target)


def _fetch_header(hub_id: str, revision: str | None, file: str, size: int, path: Path) -> None:
    """Write the header of a file of tensors, and a hole up to its size."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(hub_id, file, revision=revision)
    prefix = _part(url, 0, 8)
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(MOST_HEADER_BYTES, size):
        raise BadInput(
            f"{file} of {hub_id!r} is no safetensors file: its header has {length:,} bytes"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as opened:
        opened.write(prefix + _part(url, 8, length))
        opened.truncate(size)


def _part(url: str, start: int, length: int) -> bytes:
    """Bytes of a file of the hub; BadInput where the hub sends something else."""
    from huggingface_hub.utils import build_hf_headers, get_session

    wanted = {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=build_hf_headers() | wanted) as answer:
        answer.raise_for_status()
        # With another status than 206 it sends the whole file.
        content = answer.read() if answer.status_code == 206 else b""
    if len(content) != length:
        raise BadInput(f"the hub sends no parts of {url}: download the model, and give its folder")
    return content
