"""Expected time of a step on GPUs that are not there, from what the compiler made of the kernels.

`python -m tools.gpu_cost` prints a table; `--compile` first compiles the kernels of the cases, or `--rows`
reads them from a file of `tools.gpu_matrix`, and keeps what the model needs of them in
docs/measured/gpu-cost.json under `after`; `before` holds the same of an earlier commit, 8-bit weights aside.
Nothing here was measured on a GPU: the constants of engine/planner/speed.py are assumed, or fit
published runs, and the queue below was chosen after the first outputs had been seen.

A kernel that streams tiles takes, for each, the longest of three: the time of its bytes; the instructions of
all programs on a multiprocessor; and what one program waits for in a turn of its loop, loads and round trips
through shared memory included. Memory serves the buffers of a multiprocessor as a closed queue (the machine
repair model): a tile that is neither waiting nor moving is on its way through latency and arithmetic. A case
is the sum of its kernels and of what lies between them. The roof of decode is a copy of the bytes that a step
must read, that of prefill a large GEMM of its multiplications. The host's time is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmopt.engine.kernels.common.devices import split_runs
from llmopt.engine.planner import speed as costs
from llmopt.engine.planner.devices import Device, find_device

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "docs" / "measured" / "gpu-cost.json"
PAGE = ROOT / "docs" / "gpu.md"


@dataclass(frozen=True, slots=True)
class Card:
    """A card as the model sees it: its device of the table, compute capability, multiprocessors and clock."""

    name: str
    capability: int
    multiprocessors: int
    hertz: float

    @property
    def device(self) -> Device:
        return find_device(self.name)

    @property
    def copy(self) -> float:
        """Bytes per second of a large copy."""
        bandwidth = self.device.bandwidth
        assert bandwidth
        return bandwidth * costs.COPIED

    @property
    def gemm(self) -> float:
        """FLOP per second of a large GEMM in bfloat16."""
        peak = self.device.peak_flops(16, "bf16")
        assert peak
        return peak * costs.LARGE_GEMM


CARDS = {
    card.name: card
    for card in (
        Card("H100 SXM", 90, 132, 1.83e9),
        Card("H200 SXM", 90, 132, 1.83e9),
        Card("B200", 100, 148, 1.85e9),
        Card("A100 80GB SXM", 80, 108, 1.41e9),
        Card("L4", 89, 58, 2.04e9),
        Card("RTX 4090", 89, 128, 2.52e9),
    )
}


@dataclass(frozen=True, slots=True)
class Loop:
    """What the compiler made of a kernel's loop over tiles.

    Attributes:
        tile_bytes: bytes that a turn of it streams from memory.
        depth: buffers of a tile; with one, nothing is loaded while a tile is multiplied.
        programs: that a multiprocessor holds at once.
        exposed: loads that a turn waits for.
        launches: kernels of a call.
        slots: programs on a multiprocessor that the launch is made for.
    """

    tile_bytes: int
    depth: int
    programs: int
    warps: int
    instructions: int
    exposed: int
    round_trips: int
    launches: int = 1
    slots: int = 1

    def chain_seconds(self, card: Card) -> float:
        """Time of one turn of one program, its tile at hand."""
        issued = self.instructions * self.warps / 4 / card.hertz
        waited = (self.exposed + 1) // 2 * costs.CACHE_SECONDS
        return issued + waited + self.round_trips * costs.BARRIER_SECONDS

    def turn_seconds(self, card: Card, programs: float) -> float:
        """Time of one turn of each of `programs` on a multiprocessor."""
        issued = programs * self.instructions * self.warps / 4 / card.hertz
        chain = self.chain_seconds(card)
        moved = self.tile_bytes * card.multiprocessors / card.copy
        if self.depth < 2:
            alone = chain + costs.MEMORY_SECONDS + moved
        else:
            alone = max(chain, moved, (costs.MEMORY_SECONDS + moved + chain) / self.depth)
        busy = _busy(round(programs * self.depth), moved / (costs.MEMORY_SECONDS + chain))
        return max(alone, issued, programs * moved / busy)


def _busy(customers: int, load: float) -> float:
    """Share of the time that the server of a closed queue is busy; `load`: service over time elsewhere."""
    terms, total = 1.0, 1.0
    for left in range(max(1, customers), 0, -1):
        terms *= left * load
        total += terms
    return 1 - 1 / total


@dataclass(frozen=True, slots=True)
class Expectation:
    """An expected time, and the share of the roof that it is.

    Attributes:
        roof: seconds of a copy of the bytes, or of a large GEMM of the multiplications.
        parts: seconds by what they are spent on.
    """

    case: str
    card: str
    seconds: float
    roof: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        return self.roof / self.seconds


LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
"""Llama-3.1-8B."""
LINEARS = ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""Outputs and inputs of a layer's linears: queries, keys and values; output; gate and up; down."""
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""Of a token's keys and values in a layer."""
BESIDE = 4
"""Kernels of a layer beside linears and attention: two norms, RoPE with the cache's write, the gate."""
AROUND = 8
"""Kernels of a step around its layers: embedding, copies, last norm, head, sampling."""
PREFILL = 8192

CASES = {
    "8B bf16, batch 1": (1, 128, 16),
    "batch 32 at 4k": (32, 4096, 16),
    "W4A16, batch 1": (1, 128, 4),
    "W4A16, batch 1, quantized head": (1, 128, 4),
    "W8A16, batch 1": (1, 128, 8),
    "W8A16, batch 32 at 4k": (32, 4096, 8),
    "fp8 weights, batch 1": (1, 128, 8),
    "fp8 weights, batch 32 at 4k": (32, 4096, 8),
    "batch 256 at 1k": (256, 1024, 16),
    "batch 256 at 1k, one at 100k": (256, 1024, 16),
    "prefill 8k": (0, 0, 16),
}
"""Batch, context and bits of the weights; the head has 16, but for `PACKED_HEAD`."""
PACKED_HEAD = ("W4A16, batch 1, quantized head",)
"""Cases whose head (`--quantize-lm-head`) has the bits of the weights."""
LINEAR_LAUNCHES = {
    "W4A16": "4-bit weights, symmetric",
    "W8A16": "8-bit weights",
    "fp8 weights": "fp8 weights",
}
"""The launch of `tools.gpu_matrix` whose GEMM a quantized case has; its name begins with the key."""
ATTENTION = "attention, 32 heads of 128 on 8"
LONGEST = {"batch 256 at 1k, one at 100k": 100_000}
"""Tokens of the one longer sequence of a case."""


def linear_of(case: str) -> str:
    """The loop of a quantized case's linears: the kernel, and the rows of its tile."""
    return f"{case.split(',')[0]}, {max(16, CASES[case][0])} rows"


def is_known(case: str, state: str) -> bool:
    """Whether the kernels of a case are known for a state."""
    facts = json.loads(FACTS.read_text())[state]
    return CASES[case][2] == 16 or all(linear_of(case) in loops for loops in facts.values())


def expected(case: str, card: str, state: str = "after") -> Expectation:
    """What a case of `CASES` should take on a card of `CARDS`.

    Args:
        state: `after` for the kernels as they are, `before` for those of the earlier commit.
    """
    facts = json.loads(FACTS.read_text())[state][str(CARDS[card].capability)]
    loops = {name: Loop(**fields) for name, fields in facts.items()}
    if case == "prefill 8k":
        return _prefill(case, CARDS[card], loops)
    return _decode(case, CARDS[card], loops)


def _decode(case: str, card: Card, loops: dict[str, Loop]) -> Expectation:
    batch, context, bits = CASES[case]
    attention = loops["decode"]
    # Of 4 bits there is a 16-bit scale for each 128.
    per_weight = 0.5 + 2 / 128 if bits == 4 else bits / 8
    packs_head = case in PACKED_HEAD
    head = VOCABULARY * HIDDEN * (per_weight if packs_head else 2)
    weights = LAYERS * sum(out * inputs for out, inputs in LINEARS) * per_weight
    longest = LONGEST.get(case, context)
    cache = LAYERS * ((batch - 1) * context + longest) * TOKEN_BYTES
    plain = (0 if packs_head else head) + (weights if bits == 16 else 0)
    streamed = plain * costs.COPIED / costs.STREAMED / card.copy
    launches = AROUND + LAYERS * (BESIDE + attention.launches)
    parts = {"attention": LAYERS * _attention(card, attention, batch, context, longest)}
    launches += LAYERS * len(LINEARS)
    parts["weights"] = streamed
    if bits != 16:
        loop = loops[linear_of(case)]
        linears = [_packed(card, loop, bits, *linear) for linear in LINEARS]
        parts["weights"] += LAYERS * sum(seconds for seconds, _ in linears)
        launches += LAYERS * sum(split for _, split in linears) * (loop.launches - 1)
    if packs_head:
        parts["weights"] += _packed(card, loop, bits, VOCABULARY, HIDDEN)[0]
    parts["launches"] = launches * costs.LAUNCH_SECONDS
    roof = (head + weights + cache) / card.copy
    return Expectation(case, card.name, sum(parts.values()), roof, parts)


def _attention(card: Card, loop: Loop, batch: int, context: int, longest: int) -> float:
    """A layer's attention. A part is 256 keys; without a work list (`slots` 0) the parts of a sequence share
    the programs that about 1,024 leave for each KV head."""
    keys = loop.tile_bytes // (4 * HEAD_DIM)
    turns = KV_HEADS * ((batch - 1) * context + longest) / keys
    programs = min(loop.programs, max(1.0, turns / (256 / keys) / card.multiprocessors))
    rounds = turns / (programs * card.multiprocessors)
    fill = costs.MEMORY_SECONDS / programs * max(1.0, rounds * keys / 256)
    shared = rounds * loop.turn_seconds(card, programs) + fill
    if loop.slots:
        return shared
    each = max(1, 1024 // (batch * KV_HEADS))
    return max(shared, longest / keys / each * loop.turn_seconds(card, 1))


def _packed(card: Card, loop: Loop, bits: int, outputs: int, inputs: int) -> tuple[float, bool]:
    """Seconds of a quantized linear, in tiles of 64 outputs by runs of inputs; and whether it is split-K."""
    tiles, runs = outputs // 64, inputs // (loop.tile_bytes * 8 // bits // 64)
    slots = loop.slots * card.multiprocessors
    if loop.launches == 1:
        each = split_runs(tiles, runs, slots)
    else:
        each = -(-runs // min(max(1, slots // tiles), max(1, runs // 2)))
    programs = tiles * -(-runs // each)
    held = min(loop.programs, programs / card.multiprocessors)
    waves = -(-programs // (loop.programs * card.multiprocessors))
    turn = loop.turn_seconds(card, held)
    fill = costs.MEMORY_SECONDS * (2 if each < runs else 1)
    return waves * each * turn + fill, each < runs


def _prefill(case: str, card: Card, loops: dict[str, Loop]) -> Expectation:
    """A prompt of 8,192 tokens, in one chunk: linears by the library's GEMM, attention by ours."""
    linears = 2 * PREFILL * LAYERS * sum(out * inputs for out, inputs in LINEARS)
    pairs = PREFILL * (PREFILL + 1) / 2
    multiplied = 4 * LAYERS * HEADS * HEAD_DIM * pairs
    loop, rows, keys = loops["prefill"], 128, loops["prefill"].tile_bytes // (4 * HEAD_DIM)
    turns = LAYERS * HEADS * pairs / (rows * keys)
    per_turn = 4 * rows * keys * HEAD_DIM * card.multiprocessors / (card.gemm * loop.programs)
    # Softmax and products take turns on a multiprocessor that holds one program.
    turn = max(loop.chain_seconds(card), 2 * per_turn)
    turn += costs.MEMORY_SECONDS * (loop.depth < 2)
    attention = turns * turn / (card.multiprocessors * loop.programs)
    # Norms, RoPE and the gate read and write what the linears do.
    moved = LAYERS * PREFILL * 2 * (8 * HIDDEN + 3 * INNER) / card.copy
    parts = {
        "linears": linears / card.gemm / (costs.MULTIPLIED / costs.LARGE_GEMM) ** 0.5,
        "attention": attention,
        "between": moved,
    }
    roof = (linears + multiplied) / card.gemm
    return Expectation(case, card.name, sum(parts.values()), roof, parts)


def facts_of(
    rows: list[dict[str, Any]], slots: int, work_slots: int, split_launches: int
) -> dict[str, Any]:
    """The loops of the cases, from rows of `tools.gpu_matrix` for one capability.

    Args:
        slots: programs on a multiprocessor that packed weights are split for; 0: as many as it holds, to 4.
        work_slots: those that share a work list of attention; 0: there is none.
        split_launches: kernels of a split linear: 2 where another adds the sums.
    """
    attends = [row for row in rows if row["launch"] == ATTENTION and row["name"] == "attend"]
    wanted = {
        "decode": next(row for row in attends if row["variant"]["IN_PARTS"]),
        "prefill": next(row for row in attends if not row["variant"]["IN_PARTS"]),
    }
    for case in filter(lambda case: CASES[case][2] < 16, CASES):
        launch = LINEAR_LAUNCHES[case.split(",")[0]]
        gemms = (row for row in rows if row["launch"] == launch and row["name"] == "_gemm")
        wanted[linear_of(case)] = next(
            row for row in gemms if row["variant"]["ROWS"] == max(16, CASES[case][0])
        )
    made: dict[str, Any] = {}
    for name, row in wanted.items():
        pipeline, variant = row["pipeline"], row["variant"]
        is_linear = row["name"] == "_gemm"
        tile = 64 * 128 if is_linear else variant["TILE"] * 2 * HEAD_DIM * 2
        loop = Loop(
            tile_bytes=tile,
            depth=max(1, pipeline["depth"]),
            programs=row["programs"],
            warps=row["warps"],
            instructions=row["loop_instructions"],
            exposed=pipeline["exposed_loads"],
            round_trips=pipeline["round_trips"],
            launches=split_launches if is_linear else 1 + (name == "decode"),
            slots=slots or min(4, row["programs"])
            if is_linear
            else {"decode": work_slots}.get(name, 1),
        )
        made[name] = asdict(loop)
    return made


def table() -> str:
    """Expected shares of the roof, before and after, in Markdown."""
    lines = ["| case | " + " | ".join(CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for case in CASES:
        cells = []
        for card in CARDS:
            states = [state for state in ("before", "after") if is_known(case, state)]
            made = [expected(case, card, state) for state in states]
            shares = " → ".join(f"{each.share:.0%}" for each in made)
            cells.append(f"{shares}, {made[-1].seconds * 1e3:.3g} ms")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the kernels again")
    parser.add_argument("--json", action="store_true", help="every expectation, with its parts")
    parser.add_argument("--rows", type=Path, help="compiled kernels: a file of tools.gpu_matrix")
    given = parser.parse_args()
    if given.compile or given.rows:
        _renew(json.loads(given.rows.read_text()) if given.rows else _compiled())
    if given.json:
        states = ("before", "after")
        made = [
            {
                "state": state,
                **asdict(expected(case, card, state)),
                "share": round(expected(case, card, state).share, 3),
            }
            for state in states
            for case in CASES
            if is_known(case, state)
            for card in CARDS
        ]
        json.dump(made, sys.stdout, indent=1)
    else:
        print(table())


def _compiled() -> list[dict[str, Any]]:
    """Compile the kernels of the cases."""
    from tools.gpu_matrix import rows

    names = [ATTENTION, *LINEAR_LAUNCHES.values()]
    capabilities = sorted({card.capability for card in CARDS.values()})
    return [row for capability in capabilities for row in rows(capability, names=names)]


def _renew(compiled: list[dict[str, Any]]) -> None:
    """Renew what is known of the kernels as they are."""
    from llmopt.engine.kernels.attention.triton_attention import SLOTS

    stored = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    stored["after"] = {
        str(capability): facts_of(
            [row for row in compiled if row["capability"] == capability], 0, SLOTS, 1
        )
        for capability in sorted({card.capability for card in CARDS.values()})
    }
    FACTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
