"""`EngineConfig`: the options of an engine and of its speculation, their limits and the enabled features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...base.errors import BadInput
from ...base.option import at_least, check_limits, one_of, option, share
from ..base.units import parse_bytes, parse_size
from ..scheduling.block_pool import Window
from ..scheduling.kv_eviction import DEFAULT_METHOD, METHODS, KvEviction
from ..scheduling.scheduler_config import POLICIES
from .adapters import parse_adapters
from .compatibility import refuse, refuse_on_mps

PROPOSERS = ("ngram", "draft", "medusa", "eagle")
TREE_METHODS = ("medusa", "eagle")
"""Methods that draft token trees."""
DEFAULT_TREE_WIDTH = 2
ACCEPTANCES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Options of speculative decoding; each field's metadata is its definition.

    "coupled" acceptance samples each token as without speculation, and accepts a draft token that is the
    same, so that seeded sampling gives the same tokens with and without speculation. "rejection" is the
    rejection sampling of Leviathan et al. (2023), which accepts more of a draft model's tokens and keeps the
    distribution. For greedy decoding they are the same.
    """

    PANEL: ClassVar = "Speculative decoding"

    method: str = option(
        MISSING,
        "Draft-token proposer: ngram (prompt lookup in the sequence itself), draft (a smaller model), "
        "medusa or eagle (heads that were trained for the model).",
        flag="--speculative",
        hidden_flags=("--spec-method",),
    )
    draft_model: str | Path | None = option(
        None,
        "Draft model with the same vocabulary, or the folder of the heads: a folder, a bundled model's "
        "name, or a hub id.",
        hidden_flags=("--spec-model",),
        word=str,
    )
    num_tokens: int = option(
        4,
        "Maximum number of draft tokens per sequence and step; fewer at a low acceptance rate.",
        flag="--num-speculative-tokens",
        hidden_flags=("--spec-tokens",),
    )
    ngram_min: int = option(
        2, "ngram: minimum length of a match, in tokens.", flag="--prompt-lookup-min"
    )
    ngram_max: int = option(
        4,
        "ngram: maximum length of a match, in tokens; the longest is tried first.",
        flag="--prompt-lookup-max",
    )
    acceptance: str = option(
        "coupled",
        "coupled (seeded sampling gives the same tokens as without) or rejection (rejection sampling).",
        flag="--speculative-acceptance",
    )
    tree_width: int | None = option(
        None,
        "medusa, eagle: draft tokens per position of the tree, on average.",
        flag="--speculative-tree-width",
        show_default="2",
    )

    @classmethod
    def asked(
        cls, method: str | None = None, draft_model: str | Path | None = None, **others: Any
    ) -> SpeculationConfig | None:
        """The config of command-line options; a draft model alone selects the method `draft`."""
        if method is None and draft_model is None:
            return None
        return cls(method or "draft", draft_model, **others)

    def __post_init__(self) -> None:
        if self.method not in PROPOSERS:
            raise BadInput(f"speculation {self.method!r}: choose {', '.join(PROPOSERS)}")
        if self.acceptance not in ACCEPTANCES:
            raise BadInput(
                f"speculative acceptance {self.acceptance!r}: choose {' or '.join(ACCEPTANCES)}"
            )
        if not 1 <= self.num_tokens <= 64:
            raise BadInput(f"num_speculative_tokens = {self.num_tokens}: need 1 to 64")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise BadInput(
                f"prompt lookup of {self.ngram_min} to {self.ngram_max} tokens: need 1 or more, and "
                "the smaller number first"
            )
        if self.method == "draft" and self.draft_model is None:
            raise BadInput("speculation by a draft model needs one: give --draft-model")
        if self.method in TREE_METHODS and self.draft_model is None:
            raise BadInput(
                f"{self.method} speculation needs the folder of the heads: give it as --draft-model"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise BadInput("a draft model has no use in ngram speculation: leave one out")
        if self.tree_width is not None and not 1 <= self.tree_width <= 16:
            raise BadInput(f"speculative_tree_width = {self.tree_width}: need 1 to 16")
        if self.width > 1 and self.method not in TREE_METHODS:
            raise BadInput(
                f"speculative_tree_width = {self.tree_width}: the draft tokens of {self.method} are a chain; "
                f"trees are for {' and '.join(TREE_METHODS)}"
            )

    @property
    def width(self) -> int:
        if self.tree_width is not None:
            return self.tree_width
        return DEFAULT_TREE_WIDTH if self.method in TREE_METHODS else 1


DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "fp8", "int8", "fp8_e4m3", "fp8_e5m2")
DEVICES = ("auto", "cpu", "cuda", "mps")


def _device(name: str) -> str | None:
    is_known = name in DEVICES or re.fullmatch(r"(cuda|cpu):[0-9]+", name)
    return None if is_known else f"choose {', '.join(DEVICES)} or cuda:N"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine. None means: derive it from the model and the machine.

    `model` is a folder, a bundled model's name, or a hub id. The metadata of every other field is its
    only definition, for the command line, benchmarks, recipes and `LLM`.

    Raises:
        BadInput: a value out of its limits, or incompatible options.
    """

    PANEL: ClassVar = "Engine"

    model: str | Path | None = None
    dtype: str = option(
        "auto",
        "Data type of activations, and of weights that are not quantized: auto (bfloat16 where the "
        "device computes in it), bfloat16 or float32.",
        limit=one_of(*DTYPES),
        common=True,
    )
    trust_remote_code: bool = option(
        False,
        "Run code that the checkpoint brings.",
        flag="--trust-remote-code/--no-trust-remote-code",
    )
    device: str = option(
        "auto",
        "auto (CUDA where there is one), cpu, cuda, cuda:N or mps (an Apple GPU).",
        limit=_device,
        common=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of the KV cache: auto (as --dtype; with that auto too, bfloat16 on a CPU), bfloat16, "
        "float32, fp8 (e4m3) or int8, both with a scale for each token and KV head; or, on a GPU, what "
        "FlashInfer reads too: fp8_e4m3, with the checkpoint's scales or none, or fp8_e5m2, without.",
        limit=one_of(*KV_CACHE_DTYPES),
        common=True,
    )
    block_size: int | None = option(
        None, "Tokens in a block of the KV cache. Default: 16; 32 on a CPU.", limit=at_least(1)
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache, in bytes or as in 4GiB. Default: from the free memory.",
        hidden_flags=("--kv-cache-memory",),
        word=str,
        parse=parse_size,
        limit=at_least(1),
    )
    num_blocks: int | None = option(
        None,
        "Size of the KV cache in blocks, in place of --kv-cache-memory-bytes.",
        hidden_flags=("--num-gpu-blocks-override",),
        limit=at_least(1),
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of a CUDA device's memory for weights, activations and KV cache together, in (0, 1]. "
        "Default: 0.9.",
        limit=share,
    )
    swap_space_bytes: int = option(
        0,
        "Host memory, such as 4GiB, to which the KV blocks of preempted sequences are swapped out. "
        "Without it they are recomputed.",
        flag="--swap-space",
        word=str,
        parse=parse_bytes,
        limit=at_least(0),
    )
    max_model_len: int | None = option(
        None,
        "Context length: tokens in a sequence, prompt and output. Default: the model's own.",
        limit=at_least(1),
        common=True,
    )
    max_num_seqs: int | None = option(
        None,
        "Maximum number of sequences per step.",
        limit=at_least(1),
        common=True,
    )
    max_num_batched_tokens: int | None = option(
        None, "Maximum number of tokens per step.", limit=at_least(1)
    )
    prefill_chunk_size: int | None = option(
        None,
        "Chunked prefill: maximum number of tokens of one sequence per step. Default: that of the step.",
        hidden_flags=("--long-prefill-token-threshold",),
        limit=at_least(1),
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule a step, and process the outputs of the previous one, while another is in flight.",
        show_default="on a CUDA device",
        hidden_flags=("--overlapped-loop/--serial-loop",),
        former_names=("overlapped_loop",),
    )
    enforce_eager: bool = option(
        False,
        "Run every step eagerly. Otherwise decode steps are replayed from captured graphs, which gives "
        "the same numbers in less of the host's time.",
        flag="--enforce-eager/--no-enforce-eager",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order in which sequences are served: fcfs, priority (a request's own, smaller first) or "
        "shortest-prefill.",
        limit=one_of(*POLICIES),
    )
    enable_prefix_caching: bool = option(
        True,
        "Reuse the KV blocks of common prefixes of prompts.",
        hidden_flags=(" /--no-prefix-caching",),
    )
    window: int | None = option(
        None,
        "Sliding-window attention, for streams beyond the model's context in constant memory: number of "
        "tokens that each one attends to, itself included. --max-model-len then has no default.",
        limit=at_least(1),
    )
    attention_sinks: int = option(
        0,
        "With --window: sink tokens, the first ones, which stay visible. 4 keep a stream's quality.",
        limit=at_least(0),
    )
    kv_budget: int | None = option(
        None,
        "KV eviction, which is not lossless: tokens of a sequence that stay in every layer and KV head "
        "once its prompt is computed. Default: all.",
        limit=at_least(1),
    )
    kv_eviction: str | None = option(
        None,
        "With --kv-budget: snapkv (what the end of the prompt attends to; the output stays) or h2o "
        "(heavy hitters and the last tokens, of the output too).",
        limit=one_of(*METHODS),
        show_default=DEFAULT_METHOD,
    )
    seed: int = option(
        0,
        "Random seed of requests without one; of a benchmark also that of its prompts, their order "
        "and the gaps between them.",
    )
    num_threads: int | None = option(
        None,
        "CPU threads of a step. Default: the physical cores that this process may use, or fewer where "
        "these are measured to be faster.",
        limit=at_least(1),
    )
    cpu_activations: int | None = option(
        None,
        "Bits of the activations that quantized weights are multiplied with on a CPU. 16: as they are; "
        "8: quantized in blocks of channels, which is faster. Default: as the format's own engine, "
        "8 for GGUF, else 16.",
        limit=one_of(8, 16),
    )
    tensor_parallel_size: int = option(
        1,
        "Processes that each layer is sharded over, each with its share of the cores or a GPU.",
        limit=at_least(1),
        common=True,
    )
    loras: Mapping[str, Path] = option(
        MISSING,
        "NAME=FOLDER of a LoRA adapter in PEFT's form; repeatable. A server offers it as the model NAME; "
        "a benchmark assigns its requests to the adapters, and names them alone to a running server.",
        factory=dict,
        flag="--lora",
        hidden_flags=("--lora-modules",),
        former_names=("lora",),
        word=list[str],
        parse=parse_adapters,
    )
    max_loras: int | None = option(
        None,
        "Maximum number of LoRA adapters, where some are loaded later. Default: those of --lora.",
        limit=at_least(1),
    )
    language_model_only: bool = option(
        False,
        "Leave out the vision tower of an image-text model: it takes text alone.",
        flag="--language-model-only/--no-language-model-only",
    )
    encoder_cache_bytes: int = option(
        256 << 20,
        "Memory for embeddings of images, such as 1GiB, which later steps, prompts and recomputation of "
        "preempted sequences find by the image's content.",
        flag="--encoder-cache-memory",
        word=str,
        parse=parse_size,
        limit=at_least(0),
        show_default="256MiB",
    )
    speculation: SpeculationConfig | None = option(
        None, "Speculative decoding.", config=SpeculationConfig
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.attention_sinks and self.window is None:
            raise BadInput(
                f"attention_sinks = {self.attention_sinks} are kept beside a window: give window too"
            )
        if self.kv_eviction is not None and self.kv_budget is None:
            raise BadInput(
                f"kv_eviction {self.kv_eviction!r} needs a budget of tokens: give kv_budget too"
            )
        if self.kv_cache_memory_bytes is not None and self.num_blocks is not None:
            raise BadInput("give kv_cache_memory_bytes or num_blocks, not both")
        if self.gpu_memory_utilization is not None and (
            self.kv_cache_memory_bytes is not None or self.num_blocks is not None
        ):
            raise BadInput(
                "gpu_memory_utilization has no use where the size of the KV cache is given: leave one out"
            )
        if self.max_loras is not None and self.max_loras < len(self.loras):
            raise BadInput(f"max_loras = {self.max_loras}: {len(self.loras)} adapters are given")
        refuse(self.features)
        if self.device == "mps":
            refuse_on_mps(self.features)

    @property
    def stream(self) -> Window | None:
        """The visible window of StreamingLLM; None: sequences end at the model's context."""
        return None if self.window is None else Window(self.window, self.attention_sinks)

    def activation_bits(self, quant_method: str | None) -> int:
        """Bits of a CPU's activations for weights of a format: llama.cpp quantizes those of GGUF files."""
        return self.cpu_activations or (8 if quant_method == "gguf" else 16)

    def eviction(self, block_size: int) -> KvEviction | None:
        """Rule of the KV-cache budget for such blocks, or None. BadInput: the budget is below a block."""
        if self.kv_budget is None:
            return None
        return KvEviction(self.kv_eviction or DEFAULT_METHOD, self.kv_budget, block_size)

    def overlaps(self, device_type: str) -> bool:
        """True if steps on a device are scheduled asynchronously: by default where a host may hold it up."""
        if self.async_scheduling is None:
            return device_type == "cuda"
        return self.async_scheduling

    @property
    def features(self) -> frozenset[str]:
        """The features of `compatibility.FEATURES` that these options enable."""
        enabled = {
            "chunks": self.prefill_chunk_size is not None,
            "no-prefix-cache": not self.enable_prefix_caching,
            "policy": self.scheduling_policy != "fcfs",
            "overlap": bool(self.async_scheduling),
            "eager": self.enforce_eager,
            "swap": self.swap_space_bytes > 0,
            "kv-fp8": self.kv_cache_dtype.startswith("fp8"),
            "kv-int8": self.kv_cache_dtype == "int8",
            "streams": self.window is not None,
            "kv-budget": self.kv_budget is not None,
            "lora": bool(self.loras or self.max_loras),
            "tensor-parallel": self.tensor_parallel_size > 1,
            "activations-8": self.cpu_activations == 8,
        }
        if self.speculation is not None:
            enabled[self.speculation.method] = True
            enabled["rejection"] = self.speculation.acceptance == "rejection"
        return frozenset(name for name, is_enabled in enabled.items() if is_enabled)
