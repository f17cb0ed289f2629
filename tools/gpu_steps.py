"""What a layer of today's models takes on a GPU, without one: `python -m tools.gpu_steps`.

A decode step of each model runs on the pretended card. Launches of a layer are the difference between two
depths; whether a graph replays the step is read from the card's log. For the time, layers in their real
widths, with few experts and words, launch what Triton compiles for compute capability 9.0: the issue time is
what an H100's schedulers need for the instructions of our kernels, a lower bound that memory only adds to.
`--before FILE` puts an earlier run's numbers, saved by `--out`, in front of these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITY = 90
PROMPT, BATCH = 512, 1
"""Tokens before the decode step whose kernels are compiled, and its sequences."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers.

    Attributes:
        config: the class of its config in transformers.
        real: its widths; of experts as many as a token meets at most.
        small: what a small model of its kind needs beside them.
        kinds: of layers that recur; empty: all are alike.
    """

    config: str
    real: Mapping[str, Any]
    small: Mapping[str, Any]
    kinds: tuple[str, ...] = ()

    def overrides(self, widths: Mapping[str, Any], repeats: int) -> dict[str, Any]:
        """Fields of a config with so many times the layers that recur."""
        types = {"layer_types": [*self.kinds] * repeats} if self.kinds else {}
        return {**widths, **types, "num_hidden_layers": repeats * self.period}

    @property
    def period(self) -> int:
        """Layers that recur."""
        return max(1, len(self.kinds))


LINEAR, FULL = "linear_attention", "full_attention"
WIDE = {"max_position_embeddings": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA = {**WIDE, "hidden_size": 4096, "intermediate_size": 14336}
NEXT = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip
SMALL_NEXT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "head_dim": 16,
}  # fmt: skip
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_routed_experts": 8}
DELTA = (LINEAR, LINEAR, LINEAR, FULL)
MODELS: dict[str, Layers] = {
    "Llama-3.1-8B": Layers("LlamaConfig", LLAMA, {}),
    "Qwen3-8B": Layers(
        "Qwen3Config", {**LLAMA, "intermediate_size": 12288, "head_dim": 128}, {"head_dim": 32},
    ),
    "Qwen3-Next-80B-A3B": Layers(
        "Qwen3NextConfig",
        {
            **NEXT, "num_experts": 10, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        {**SMALL_NEXT, **FEW, "shared_expert_intermediate_size": 48},
        DELTA,
    ),
    "Qwen3.5-4B": Layers(
        "Qwen3_5TextConfig",
        {**NEXT, "hidden_size": 2560, "num_key_value_heads": 4, "intermediate_size": 9216},
        SMALL_NEXT, DELTA,
    ),
    "LFM2-1.2B": Layers(
        "Lfm2Config", {**WIDE, "hidden_size": 2048, "intermediate_size": 12288}, {}, ("conv", "conv", FULL)
    ),
    "Mixtral-8x7B": Layers(
        "MixtralConfig", {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 2}, {"num_local_experts": 4}
    ),
    "Qwen3-30B-A3B": Layers(
        "Qwen3MoeConfig",
        {
            **WIDE, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 8,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
        {**FEW, "head_dim": 16},
    ),
    "DeepSeek-V3": Layers(
        "DeepseekV3Config",
        {
            **LATENT, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "max_position_embeddings": 2048,
        },
        {
            **LATENT, **FEW, "num_key_value_heads": 8, "kv_lora_rank": 24, "q_lora_rank": 40,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        },
    ),
}  # fmt: skip
SMALL = {
    "max_position_embeddings": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
PROMPTS = {
    "GQA, 32 heads of 128 on 8": "attention, 32 heads of 128 on 8",
    "  int8 cache": "  int8 cache",
    "MLA, 16 heads on 576": "attention, 16 heads on a latent of 576",
    "  int8 latent": "  of an int8 latent",
}
"""Launches of `tools.triton_launches` whose attention of prompts is shown."""


def count_launches(model: Layers, *, eager: bool) -> tuple[float, bool]:
    """Launches that a layer adds to a decode step, and whether the step is replayed from a graph."""
    first, second = (_small_step(model, repeats, eager=eager) for repeats in (1, 2))
    return (second[0] - first[0]) / model.period, first[1]


def _small_step(model: Layers, repeats: int, *, eager: bool) -> tuple[int, bool]:
    """Launches of a decode step of a small model, and whether it was a graph's replay."""
    widths = model.overrides({**SMALL, **model.small}, repeats)
    with _engine(model.config, widths, eager=eager) as (engine, card):
        with _decoding(engine, 7), card.during("decode"):
            engine.step()
        kinds = [entry.kind for entry in card.log if entry.phase == "decode"]
    return sum(kind in ("kernel", "triton") for kind in kinds), "replay" in kinds


@contextlib.contextmanager
def _engine(config: str, overrides: dict[str, Any], *, eager: bool) -> Iterator[tuple[Any, Any]]:
    """A random model in an engine on the pretended card."""
    from tests.support.model_families import save_model
    from tests.support.pretended_cuda.card import Card
    from tests.support.pretended_cuda.world import engine_on

    options = {"num_blocks": 80, "block_size": 16, "enforce_eager": eager, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), config, overrides)
        card = Card()
        with engine_on(card, Path(folder), **options) as engine:
            yield engine, card


@contextlib.contextmanager
def _decoding(engine: Any, prompt: int) -> Iterator[None]:
    """A context in which the engine's next step decodes one sequence of so many tokens."""
    from llmopt.engine.base.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("0", [1 + index % 50 for index in range(prompt)], params)
    for _ in range(3):
        engine.step()
    yield
    engine.abort("0")


def compile_step(model: Layers) -> tuple[float, int]:
    """Seconds of issue of our kernels in a layer's decode step, and the most bytes that one of them spills,
    a prompt's kernels included."""
    from tools.triton_code import compiling

    widths = model.overrides(model.real, 1)
    with (
        _engine(model.config, widths, eager=True) as (engine, _),
        contextlib.ExitStack() as decoding,
    ):
        with compiling(CAPABILITY) as prefill:
            decoding.enter_context(_decoding(engine, PROMPT))
        with compiling(CAPABILITY, every=True) as decode:
            engine.step()
    seconds = sum(each.issue_seconds(each.turns) for each in decode)
    return seconds / model.period, max(each.stack for each in (*prefill, *decode))


def prompt_attention() -> dict[str, dict[str, Any]]:
    """The attention kernel of prompts, by the name of the launch."""
    from llmopt.engine.kernels.common.devices import pretended_gpu

    from tools.gpu_matrix import ARCHITECTURES
    from tools.triton_code import compiling
    from tools.triton_launches import LAUNCHES

    found: dict[str, dict[str, Any]] = {}
    for label, name in PROMPTS.items():
        with pretended_gpu(ARCHITECTURES[CAPABILITY].limits), compiling(CAPABILITY) as kernels:
            LAUNCHES[name]()
        (kernel,) = (k for k in kernels if k.name == "attend" and not k.variant["IN_PARTS"])
        pairs = kernel.variant["ROWS"] * kernel.variant["TILE"]
        found[label] = {
            "rows": kernel.variant["ROWS"],
            "matrix": " ".join(kernel.matrix),
            "spilled": kernel.stack,
            # The shortest loop is that without masks; each warp issues its instructions once a turn.
            "each": min(kernel.loops) * kernel.warps / pairs * 1024,
        }
    return found


def measure(names: list[str]) -> dict[str, Any]:
    """The numbers of the models, and of the attention of prompts."""
    models: dict[str, Any] = {}
    for name in names:
        model = MODELS[name]
        launches, _ = count_launches(model, eager=True)
        _, replayed = _small_step(model, 1, eager=False)
        seconds, spilled = compile_step(model)
        models[name] = {
            "launches": launches, "captured": replayed, "micros": 1e6 * seconds, "spilled": spilled,
        }  # fmt: skip
        print(f"{name}: {models[name]}", file=sys.stderr, flush=True)
    return {"models": models, "prompts": prompt_attention()}


def tables(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Both tables as Markdown, `before → now`; what there was no number of is `–`."""

    def pair(part: str, name: str, field: str, form: str = "{}") -> str:
        known = [side.get(part, {}).get(name) for side in (before, now)]
        shown = ["–" if one is None else _shown(one[field], form) for one in known]
        return shown[1] if not before else " → ".join(shown)

    lines = [
        "| model | launches a layer | captured | issue of our kernels, µs a layer | spilled bytes |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name in now["models"]:
        cells = (pair("models", name, "launches", "{:.4g}"), pair("models", name, "captured"))
        cells += (pair("models", name, "micros", "{:.2f}"), pair("models", name, "spilled"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "| attention of prompts | rows of a tile | matrix instruction | spilled bytes | instructions |",
    ]
    lines += ["|---|---|---|---|---|"]
    for name in now["prompts"]:
        cells = tuple(pair("prompts", name, field) for field in ("rows", "matrix", "spilled"))
        cells += (pair("prompts", name, "each", "{:.0f}"),)
        lines.append(f"| {name.strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: Any, form: str) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else form.format(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--before", type=Path, help="an earlier run's file")
    parser.add_argument("--out", type=Path, help="JSON file for these numbers")
    parser.add_argument("--read", type=Path, help="a file of numbers, in place of making them anew")
    given = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    now = json.loads(given.read.read_text()) if given.read else measure(given.only)
    if given.out:
        given.out.write_text(json.dumps(now, indent=1) + "\n")
    print(tables(json.loads(given.before.read_text()) if given.before else {}, now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
