"""Expected time of a step on GPUs that are not there, from what the compiler made of the kernels.

`python -m tools.gpu_cost` prints a table; `--compile` first compiles the kernels of the cases, and keeps what
the model needs of them in docs/measured/gpu-cost.json under `after`; `before` holds the same of an earlier
commit. Nothing here was measured on a GPU: the constants of engine/planner/device/gpu_costs.py are assumed,
or fit published runs, and the queue below was chosen after the first outputs had been seen.

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

from llmopt.engine.kernels.common.triton_split import split_runs
from llmopt.engine.planner.device import gpu_costs as costs
from llmopt.engine.planner.device.devices import Device, find_device

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
    "batch 256 at 1k": (256, 1024, 16),
    "batch 256 at 1k, one at 100k": (256, 1024, 16),
    "prefill 8k": (0, 0, 16),
}
"""Batch, context and bits of the weights; the head has 16."""
LONGEST = {"batch 256 at 1k, one at 100k": 100_000}
"""Tokens of the one longer sequence of a case."""


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
    head = VOCABULARY * HIDDEN * 2
    attention = loops["decode"]
    # 4 bits, and a 16-bit scale for each 128.
    per_weight = 2 if bits == 16 else 0.5 + 2 / 128
    weights = LAYERS * sum(out * inputs for out, inputs in LINEARS) * per_weight
    longest = LONGEST.get(case, context)
    cache = LAYERS * ((batch - 1) * context + longest) * TOKEN_BYTES
    streamed = (head + (weights if bits == 16 else 0)) * costs.COPIED / costs.STREAMED / card.copy
    launches = AROUND + LAYERS * (BESIDE + attention.launches)
    parts = {"attention": LAYERS * _attention(card, attention, batch, context, longest)}
    launches += LAYERS * len(LINEARS)
    parts["weights"] = streamed
    if bits != 16:
        linears = [_packed(card, loops["packed"], *linear) for linear in LINEARS]
        parts["weights"] += LAYERS * sum(seconds for seconds, _ in linears)
        launches += LAYERS * sum(split for _, split in linears) * (loops["packed"].launches - 1)
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


def _packed(card: Card, loop: Loop, outputs: int, inputs: int) -> tuple[float, bool]:
    """Seconds of a packed linear, tiles of 64 outputs by runs of 256 inputs; and whether it is split-K."""
    tiles, runs = outputs // 64, inputs // 256
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
    attends = [row for row in rows if "KEY_DIM" in row["variant"]]
    gemm = next(
        row for row in rows if "OUTPUTS" in row["variant"] and row["launch"].endswith("symmetric")
    )
    wanted = {
        "decode": next(row for row in attends if row["variant"]["IN_PARTS"]),
        "prefill": next(row for row in attends if not row["variant"]["IN_PARTS"]),
        "packed": gemm,
    }
    made: dict[str, Any] = {}
    for name, row in wanted.items():
        pipeline, variant = row["pipeline"], row["variant"]
        tile = 64 * 256 // 2 if name == "packed" else variant["TILE"] * 2 * HEAD_DIM * 2
        loop = Loop(
            tile_bytes=tile,
            depth=max(1, pipeline["depth"]),
            programs=row["programs"],
            warps=row["warps"],
            instructions=row["loop_instructions"],
            exposed=pipeline["exposed_loads"],
            round_trips=pipeline["round_trips"],
            launches={"decode": 2, "packed": split_launches}.get(name, 1),
            slots={"decode": work_slots, "packed": slots or min(4, row["programs"])}.get(name, 1),
        )
        made[name] = asdict(loop)
    return made


def table() -> str:
    """Expected shares of the roof, before and after, in Markdown."""
    lines = ["| case | " + " | ".join(CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for case in CASES:
        cells = []
        for card in CARDS:
            was, now = (expected(case, card, state) for state in ("before", "after"))
            cells.append(f"{was.share:.0%} → {now.share:.0%}, {now.seconds * 1e3:.3g} ms")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the kernels again")
    parser.add_argument("--json", action="store_true", help="every expectation, with its parts")
    given = parser.parse_args()
    if given.compile:
        _compile()
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
            for card in CARDS
        ]
        json.dump(made, sys.stdout, indent=1)
    else:
        print(table())


def _compile() -> None:
    """Renew what is known of the kernels as they are."""
    from llmopt.engine.kernels.attention.triton_attention import SLOTS

    from tools.gpu_matrix import rows

    stored = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    stored["after"] = {}
    for capability in sorted({card.capability for card in CARDS.values()}):
        read = [
            row
            for launch in ("attention, 32 heads of 128 on 8", "4-bit weights, symmetric")
            for row in rows(capability, launch)
        ]
        stored["after"][str(capability)] = facts_of(read, 0, SLOTS, 1)
    FACTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
