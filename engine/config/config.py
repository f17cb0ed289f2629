"""What the user chose, and what follows from it on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...quant.base.errors import BadInput
from ..scheduling.scheduling_policy import POLICIES
from ..scheduling.window import Window
from .compatibility import refuse
from .speculation import SpeculationConfig

DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "fp8", "int8")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine. None means: derive it from the model and the machine.

    Attributes:
        model: a folder, a bundled model's name, or a hub id.
        dtype: of weights that are not quantized and of activations. "auto" takes bfloat16 where the
            device computes in it, float32 elsewhere.
        kv_cache_dtype: of keys and values at rest; "auto" takes `dtype`. fp8 (e4m3) and int8 keep a
            float32 scale for each token and KV head.
        device: "auto" takes CUDA where there is one.
        block_size: tokens in a KV block.
        kv_cache_memory_bytes, num_blocks: size of the KV cache, in one of the two ways.
        gpu_memory_utilization: share of a CUDA device's memory that weights, steps and cache may take
            together, in (0, 1]; None is 0.9. The cache gets what the others leave.
        swap_space_bytes: of host memory in which preempted sequences keep what they had computed; 0: it is
            computed again.
        max_model_len: tokens in a sequence, at most the model's own context length.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens in one step.
        prefill_chunk_size: tokens of one sequence in one step.
        overlapped_loop: schedule a step, and make text of the one before, while another is computed.
        enforce_eager: compute every step as it comes; otherwise those of one token a sequence are repeated
            from graphs, which gives the same numbers and takes less of the host's time.
        scheduling_policy: who is served first: fcfs, priority or shortest-prefill.
        seed: of the requests that bring none.
        window, attention_sinks: for streams that go beyond the model's context in constant memory: a token
            sees the last `window` tokens, itself included, and the first `attention_sinks` ones. Then
            `max_model_len` has no default.
        num_threads: of the CPU; by default the cores that this process may use.
        cpu_activations: bits of what integer weights are multiplied with on a CPU. With 16 a checkpoint
            that quantizes weights alone gives the numbers of its weights; with 8 every token is rounded
            to 8 bits before each quantized linear, which is faster from a few tokens a step on.
        speculation: guesses that are checked together; None: a token a step.
        tensor_parallel_size: processes that share each layer's work, this one included; every one of them
            computes with `num_threads`, by default an equal share of the cores, or has a GPU of its own.
        loras: folders of adapters in PEFT's form, by the names that requests give.
    """

    model: str | Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    swap_space_bytes: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int | None = None
    overlapped_loop: bool = False
    enforce_eager: bool = False
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    window: int | None = None
    attention_sinks: int = 0
    seed: int = 0
    num_threads: int | None = None
    cpu_activations: int = 16
    tensor_parallel_size: int = 1
    loras: Mapping[str, Path] = field(default_factory=dict)
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype {self.dtype!r}: choose {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise BadInput(
                f"kv_cache_dtype {self.kv_cache_dtype!r}: choose {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.device.split(":")[0] not in DEVICES:
            raise BadInput(f"device {self.device!r}: choose {', '.join(DEVICES)} or cuda:N")
        if self.scheduling_policy not in POLICIES:
            raise BadInput(
                f"scheduling_policy {self.scheduling_policy!r}: choose {', '.join(POLICIES)}"
            )
        if self.swap_space_bytes < 0:
            raise BadInput(f"swap_space_bytes = {self.swap_space_bytes}: need 0 or more")
        if self.attention_sinks < 0:
            raise BadInput(f"attention_sinks = {self.attention_sinks}: need 0 or more")
        if self.attention_sinks and self.window is None:
            raise BadInput(
                f"attention_sinks = {self.attention_sinks} are kept beside a window: give window too"
            )
        if self.cpu_activations not in (8, 16):
            raise BadInput(f"cpu_activations = {self.cpu_activations}: choose 8 or 16")
        if self.kv_cache_memory_bytes is not None and self.num_blocks is not None:
            raise BadInput("give kv_cache_memory_bytes or num_blocks, not both")
        if (share := self.gpu_memory_utilization) is not None:
            if not 0 < share <= 1:
                raise BadInput(f"gpu_memory_utilization = {share}: a share in (0, 1] is needed")
            if self.kv_cache_memory_bytes is not None or self.num_blocks is not None:
                raise BadInput(
                    "gpu_memory_utilization has no use where the size of the KV cache is given: "
                    "leave one out"
                )
        for name in (
            "block_size",
            "kv_cache_memory_bytes",
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_size",
            "window",
            "num_threads",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} = {value}: need 1 or more")
        refuse(self.features)

    @property
    def stream(self) -> Window | None:
        """What stays of a stream without end; None: sequences end at the model's context."""
        return None if self.window is None else Window(self.window, self.attention_sinks)

    @property
    def features(self) -> frozenset[str]:
        """The features of `compatibility.FEATURES` that these options turn on."""
        turned_on = {
            "chunks": self.prefill_chunk_size is not None,
            "no-prefix-cache": not self.enable_prefix_caching,
            "policy": self.scheduling_policy != "fcfs",
            "overlap": self.overlapped_loop,
            "eager": self.enforce_eager,
            "swap": self.swap_space_bytes > 0,
            "kv-fp8": self.kv_cache_dtype == "fp8",
            "kv-int8": self.kv_cache_dtype == "int8",
            "streams": self.window is not None,
            "lora": bool(self.loras),
            "tensor-parallel": self.tensor_parallel_size > 1,
            "activations-8": self.cpu_activations == 8,
        }
        if self.speculation is not None:
            turned_on[self.speculation.method] = True
            turned_on["rejection"] = self.speculation.acceptance == "rejection"
        return frozenset(name for name, is_on in turned_on.items() if is_on)
