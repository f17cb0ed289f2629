"""Device specifications: memory, bandwidth and dense peak FLOP/s, each with its source (`devices.json`), and
what an hour costs (`prices.json`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path

from ...base.errors import BadInput
from ..base.host import available_memory_bytes

# One direction of PCIe 4.0 x16, for cards without NVLink or the like.
PCIE_BYTES_PER_SECOND = 32e9


@dataclass(frozen=True, slots=True)
class HourPrice:
    """Dollars of one device for an hour, and where and when they were published."""

    dollars: float
    source: str
    date: str = ""

    @property
    def words(self) -> str:
        origin = f"{self.source}, {self.date}" if self.date else self.source
        return f"${self.dollars:g} an hour ({origin})"


@dataclass(frozen=True, slots=True)
class Device:
    """A device. `memory_bytes` is the memory visible to a process, of unified memory the GPU's share;
    `bandwidth` is in bytes/s and `peaks` in dense FLOP/s by data type, both None for a device known by its
    memory only. One that `is_unified` shares its memory with the processor; one that `is_single` is a machine
    by itself, which no link joins with others. `capability` is CUDA's, 90 for 9.0; None: it has none."""

    name: str
    memory_bytes: int
    memory_is_estimated: bool = False
    bandwidth: float | None = None
    peaks: Mapping[str, float] | None = None
    link_bytes_per_second: float = PCIE_BYTES_PER_SECOND
    kind: str = "cuda"
    is_single: bool = False
    is_unified: bool = False
    source: str = ""
    price: HourPrice | None = None
    capability: int | None = None

    def peak_flops(self, weight_bits: int | Fraction, weight_name: str) -> float | None:
        """Peak FLOP/s of the GEMM's compute dtype: fp8 weights use fp8 tensor cores if the device has them;
        weight-only integers compute in 16 bit."""
        peaks = self.peaks or {}
        if weight_bits == 32:
            return peaks.get("float32", peaks.get("bf16", peaks.get("fp16")))
        if weight_bits == 8 and weight_name.startswith("fp") and "fp8" in peaks:
            return peaks["fp8"]
        return peaks.get("bf16", peaks.get("fp16"))


@cache
def devices() -> tuple[Device, ...]:
    """The bundled table, in its order: the most common cards first, unified memory in its largest size."""
    return tuple(_read(row) for row in _rows())


DEFAULT_DEVICES = ("H100 SXM", "A100 80GB SXM", "H200 SXM", "B200", "MI300X", "L40S", "RTX 4090")
MEMORY_TOLERANCE = 0.08
"""Share by which a memory in a name may differ from the label: drivers name a B300 by 270 GB, not 288."""


def find_device(name: str) -> Device:
    """Look up a device by name or alias, ignoring case, separators and what people add to a name (NVIDIA,
    GeForce, SXM5, 80GB). Raises BadInput: no such device, with close matches, or not with that memory."""
    named = {_key(row["name"]): row for row in _rows()}
    named |= {_key(alias): row for row in _rows() for alias in row["aliases"]}
    row = next((named[key] for key in _spellings(name) if key in named), None)
    if row is None:
        close = get_close_matches(_key(name), named, n=4, cutoff=0.4)
        near = dict.fromkeys(named[key]["name"] for key in close) or DEFAULT_DEVICES
        raise BadInput(
            f"no GPU {name!r} in the table: {'near are' if close else 'it has'} {', '.join(near)}; kv-plan "
            "--list names all, kv-plan --gpu-memory 80GiB plans any"
        )
    stated = re.search(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?(?![a-z0-9])", name.lower())
    if stated is None or _key(name) == _key(row["name"]):
        return _read(row)
    sizes = row["visible_bytes"].get("by_gb") or {str(row["label_gb"]): None}
    gigabytes = int(stated[1])
    fitting = [size for size in sizes if abs(gigabytes / int(size) - 1) <= MEMORY_TOLERANCE]
    if not fitting:
        raise BadInput(
            f"--gpu {name}: {row['name']} has {', '.join(sizes)} GB, not {gigabytes}; kv-plan --gpu-memory "
            f"{gigabytes}GB plans any"
        )
    return _read(row, fitting[0])


_ADDITIONS = frozenset(
    {
        *("nvidia", "amd", "intel", "apple", "geforce", "instinct", "tesla", "radeon"),
        *("generation", "blackwell", "workstation", "server", "edition"),
    }
)


def _spellings(name: str) -> Iterator[str]:
    """Keys of a name, from as it is written to without additions, form and memory."""
    yield _key(name)
    joined = re.sub(r"(\d)\s+(g(?:i?b)?)\b", r"\1\2", name.lower())
    parts = [word for word in re.findall(r"[a-z0-9]+", joined) if word not in _ADDITIONS]
    parts = [re.sub(r"^sxm\d$", "sxm", word) for word in parts]
    formless = [word for word in parts if word not in ("sxm", "hbm3", "hbm3e")]
    for kept in (parts, formless):
        yield "".join(kept)
    for kept in (parts, formless):
        yield "".join(word for word in kept if not re.fullmatch(r"\d+g(i?b)?", word))


_COUNTED = re.compile(
    r"(\d{1,3})\s*[x\u00d7]\s*(\S.*)|(\S.*?)\s+[x\u00d7]\s*(\d{1,3})", re.IGNORECASE
)


def counted_name(text: str) -> tuple[int | None, str]:
    """The number of GPUs, if one is given, and their name: `2x l40s`, `8xH100`, `l40s x2`, `l40s`."""
    if (match := _COUNTED.fullmatch(text.strip())) is None:
        return None, text
    return int(match[1] or match[4]), match[2] or match[3]


def choose_devices(names: Sequence[str], memory_bytes: int | None) -> list[Device]:
    """The devices of these names (`all`: the whole table; `cpu`: this machine's processor, with the memory
    available now), preceded by one of `memory_bytes` without a known speed; `DEFAULT_DEVICES` without either.
    Raises BadInput: a name that is not in the table."""
    chosen = []
    if memory_bytes is not None:
        chosen.append(Device(f"{memory_bytes / 2**30:.4g} GiB", memory_bytes))
    for name in names:
        if name.lower() == "cpu":
            memory, source = available_memory_bytes(), "/proc/meminfo, available now"
            chosen.append(
                Device("cpu", memory, kind="cpu", is_single=True, is_unified=True, source=source)
            )
        else:
            chosen += devices() if name.lower() == "all" else [find_device(name)]
    return chosen or [find_device(name) for name in DEFAULT_DEVICES]


@cache
def _rows() -> list[dict]:
    return json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))


@cache
def hour_prices() -> Mapping[str, HourPrice]:
    text = Path(__file__).with_name("prices.json").read_text(encoding="utf-8")
    return {name: HourPrice(**entry) for name, entry in json.loads(text)["prices"].items()}


def _read(row: dict, gigabytes: str | None = None) -> Device:
    """The device of a row; of unified memory the one with so many gigabytes, or the most."""
    visible, link, name = row["visible_bytes"], row["nvlink_gb_s"], row["name"]
    if sizes := visible.get("by_gb"):
        gigabytes = gigabytes or max(sizes, key=int)
        name = f"{name} {gigabytes}GB"
    return Device(
        name=name,
        memory_bytes=sizes[gigabytes] if sizes else visible["value"],
        memory_is_estimated=visible.get("estimated", False),
        bandwidth=row["bandwidth_gb_s"]["value"] * 1e9,
        peaks={dtype: peak["value"] * 1e12 for dtype, peak in row["peaks"].items()},
        # The table gives bidirectional bandwidth, as data sheets do.
        link_bytes_per_second=link * 1e9 / 2 if link else PCIE_BYTES_PER_SECOND,
        kind=row.get("kind", "cuda"),
        is_single="unified" in row and not link,
        is_unified="unified" in row,
        source=f"{visible['source']}; {row['bandwidth_gb_s']['source']} ({row['date']})",
        price=hour_prices().get(row["name"]),
        capability=row.get("capability", {}).get("value"),
    )


def _key(name: str) -> str:
    return "".join(ch for ch in name.lower() if ch.isalnum())
