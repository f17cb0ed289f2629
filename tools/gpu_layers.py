"""Table a decode layer of today's models on a GPU, without one: `python -m tools.gpu_layers`.

A step of each runs on the pretended card. Launches are the difference between two depths of a small model;
whether a graph replays the step is read from the card's log. For the time, layers in real widths, with few
experts and words, launch what Triton compiles for compute capability 9.0: an H100's schedulers need so long
for the instructions of our kernels, a lower bound that memory and cuBLAS add to. Spills are of the same
kernels, a prompt's included. `--before FOLDER`, a worktree of an older commit, puts its numbers in front.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAPABILITY, PROMPT = 90, 128
"""The capability that is compiled for, and tokens before the decode step."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers.

    Attributes:
        config: the class of its config in transformers.
        real: its widths; of experts as many as a token meets at most.
        small: what a small model of its kind has in place of `SMALL`.
        kinds: of layers that recur; empty: all are alike.
    """

    config: str
    real: Mapping[str, Any]
    small: Mapping[str, Any]
    kinds: tuple[str, ...] = ()

    @property
    def period(self) -> int:
        """Layers that recur."""
        return max(1, len(self.kinds))

    def fields(self, widths: Mapping[str, Any], repeats: int) -> dict[str, Any]:
        """Fields of a config with so many times the layers that recur."""
        types = {"layer_types": [*self.kinds] * repeats} if self.kinds else {}
        return {**WORDS, **widths, **types, "num_hidden_layers": repeats * self.period}


WORDS = {"vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
NEXT = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
SMALL_NEXT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "head_dim": 16,
}  # fmt: skip
FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_routed_experts": 8}
LINEAR, FULL = "linear_attention", "full_attention"
DELTA = (LINEAR, LINEAR, LINEAR, FULL)
MODELS: dict[str, Layers] = {
    "Llama-3.1-8B": Layers("LlamaConfig", LLAMA, {}),
    "Qwen3-8B": Layers(
        "Qwen3Config", {**LLAMA, "intermediate_size": 12288, "head_dim": 128}, {"head_dim": 32}
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
        SMALL_NEXT,
        DELTA,
    ),
    "LFM2-1.2B": Layers(
        "Lfm2Config",
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 12288},
        {},
        ("conv", "conv", FULL),
    ),
    "Mixtral-8x7B": Layers(
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 2},
        {"num_local_experts": 4},
    ),
    "Qwen3-30B-A3B": Layers(
        "Qwen3MoeConfig",
        {
            **LLAMA, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 8,
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
        },
        {
            **LATENT, **FEW, "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": 40,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
        },
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Numbers of one model: launches and µs of a layer, whether the step is replayed, bytes spilled."""
    model = MODELS[name]
    one, two = (_step(model, repeats, eager=True)[0] for repeats in (1, 2))
    micros, spilled = _compiled(model)
    return {
        "launches": (two - one) / model.period,
        "captured": _step(model, 1, eager=False)[1],
        "micros": micros,
        "spilled": spilled,
    }


def _step(model: Layers, repeats: int, *, eager: bool) -> tuple[int, bool]:
    """Launches of a decode step of a small model, and whether it was a graph's replay."""
    fields = model.fields({**SMALL, **model.small}, repeats)
    with _decoding(model.config, fields, enforce_eager=eager) as (engine, card):
        _advance(engine, 7)
        with card.during("decode"):
            engine.step()
    kinds = [entry.kind for entry in card.log if entry.phase == "decode"]
    return sum(kind in ("kernel", "triton") for kind in kinds), "replay" in kinds


def _compiled(model: Layers) -> tuple[float, int]:
    """Microseconds of a layer in real widths, and the most bytes that a kernel of it spills."""
    tool: Any = _todays("tools.triton_code")
    real = _decoding(model.config, model.fields(model.real, 1), enforce_eager=True)
    with real as (engine, _), _idle_products(), tool.compiling(CAPABILITY, every=True) as kernels:
        _advance(engine, PROMPT)
        in_prefill = len(kernels)
        engine.step()
    failed = [f"{each.name}: {each.error}" for each in kernels if each.error]
    assert not failed, failed
    seconds = sum(each.issue_seconds(each.turns) for each in kernels[in_prefill:])
    return 1e6 * seconds / model.period, max(each.stack for each in kernels)


@contextmanager
def _decoding(config: str, fields: dict[str, Any], **options: Any) -> Iterator[tuple[Any, Any]]:
    """An engine on the pretended card, with weights of zeros: nothing here depends on values."""
    import torch
    import transformers
    from llmopt.recipes import MODELS as BUNDLED

    from tests.support.pretended_cuda.card import Card
    from tests.support.pretended_cuda.world import engine_on

    with tempfile.TemporaryDirectory() as folder:
        with torch.device("meta"):
            made: Any = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, config)(**fields),
                dtype=torch.bfloat16,
                trust_remote_code=False,
            )
        made = made.to_empty(device="cpu")
        for tensor in made.state_dict().values():
            tensor.zero_()
        made.save_pretrained(folder)
        del made
        words = transformers.AutoTokenizer.from_pretrained(
            BUNDLED / "stories260K", trust_remote_code=False
        )
        words.save_pretrained(folder)
        card = Card()
        cache: dict[str, Any] = {"num_blocks": 80, "block_size": 16, "max_model_len": 1024}
        with engine_on(card, Path(folder), **cache, **options) as engine:
            yield engine, card


def _advance(engine: Any, prompt: int) -> None:
    """Steps after which the next one decodes a sequence of so many tokens."""
    from llmopt.engine.base.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("0", [1 + index % 50 for index in range(prompt)], params)
    for _ in range(3):
        engine.step()


def _idle_products() -> Any:
    """A mode in which torch's matrix products are zeros, made in no time."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Idle(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.linear.default:
                return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
            if func in (aten.mm.default, aten.bmm.default):
                return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[-1])
            return func(*args, **(kwargs or {}))

    return Idle()


def _todays(module: str) -> Any:
    """A module of this file's own tree, whichever tree is measured."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    spec = util.spec_from_file_location(f"todays_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = util.module_from_spec(spec)
    sys.modules[found.__name__] = found  # dataclasses ask for it
    spec.loader.exec_module(found)
    return found


def of_tree(tree: Path, names: Sequence[str]) -> dict[str, Any]:
    """Numbers of the models by the package and the pretended card of a tree, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "llmopt"
        package.mkdir()
        modules = tree.glob("package/*.py")
        for part in (
            *(tree / n for n in ("base", "bench", "cli", "engine", "quant", "recipes")),
            *modules,
        ):
            (package / part.name).symlink_to(part)
        (package / "__init__.py").touch()  # else one that is installed comes before it
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{tree}"}
        environment.pop("TRITON_INTERPRET", None)
        numbers: dict[str, Any] = {}
        for name in names:
            run = [sys.executable, str(Path(__file__).resolve()), "--one", name]
            done = subprocess.run(run, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"{name} in {tree}: exit code {done.returncode}")
            numbers[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{tree.name}: {name}: {numbers[name]}", file=sys.stderr, flush=True)
        return numbers


def table(sides: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what each side has, from the first to the last."""
    forms = {"launches": "{:.4g}", "captured": "{}", "micros": "{:.1f}", "spilled": "{}"}
    lines = [
        "| model | launches a layer | captured | issue of our kernels, µs a layer | bytes spilled |",
        "|---|---|---|---|---|",
    ]
    for name in sides[-1]:
        cells = []
        for field, form in forms.items():
            shown = [form.format(side[name][field]) for side in sides]
            cells.append(" → ".join(dict.fromkeys(shown)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines).replace("True", "yes").replace("False", "no")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--before", type=Path, help="worktree of an older commit")
    parser.add_argument(
        "--one", choices=list(MODELS), help="one model of this process' tree, as JSON"
    )
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one)))
        return 0
    trees = [ROOT] if given.before is None else [given.before.resolve(), ROOT]
    print(table([of_tree(tree, given.only) for tree in trees]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
