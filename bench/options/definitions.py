"""The options of a benchmark, by what they are of; `BenchOptions` validates them together.

Names follow `vllm bench serve` where it has them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...base.option import one_of, option, within
from ...engine.config.config import KV_CACHE_DTYPES
from ..quality.passage import ProtocolName
from .values import each, http_url, json_object, listed, pairs, parse_depths, parse_duration

POSITIVE = within(ge=1)
COUNT = within(ge=0)
RATE = within(gt=0, finite=True)
_positive = partial(option, None, limit=POSITIVE)
"""Define an option of a number from 1, without which the data set or the command decides."""


@dataclass(frozen=True)
class DataOptions:
    """The data set, and how requests are built from it."""

    PANEL: ClassVar = "Data"
    dataset: str = option(
        "sharegpt",
        "sharegpt, agentic, random, random-mm, prefix_repetition, sonnet, custom, custom_image, "
        "hf, azure, burstgpt, mooncake, or a file. sharegpt without a path is a bundled stand-in; "
        "azure and mooncake have bundled slices.",
        flag="--dataset --dataset-name",
        common=True,
    )
    dataset_path: Path | None = option(
        None, "The data set's file; with hf OWNER/NAME; hub fetches ShareGPT's own file."
    )
    num_prompts: int = option(
        48,
        "Requests or conversations per run. Default: 48, or all of --trace or a frozen workload.",
        limit=POSITIVE,
        unset=True,
        common=True,
    )
    output_len: int | None = _positive(
        "Output tokens. Default: the data set's.",
        flag="--output-len --sharegpt-output-len --custom-output-len --hf-output-len",
    )
    random_input_len: int | None = _positive("Prompt tokens of random. Default: 1024.", common=True)
    random_output_len: int | None = _positive("Output tokens of random. Default: 128.", common=True)
    random_prefix_len: int = option(0, "Shared prefix tokens of random.", limit=COUNT)
    random_batch_size: int = option(
        1,
        "Prompts per request of openai-embeddings, documents per query of vllm-rerank. Default: 1.",
        limit=POSITIVE,
        unset=True,
    )
    random_range_ratio: float = option(
        0.0, "Lengths vary by ± this fraction.", limit=within(ge=0, lt=1)
    )
    random_mm_base_items_per_request: int = option(
        1, "Images in each request of random-mm.", limit=COUNT
    )
    random_mm_num_mm_items_range_ratio: float = option(
        0.0, "Their number varies by ± this fraction.", limit=within(ge=0, le=1)
    )
    random_mm_limit_mm_per_prompt: str | None = option(
        None, "Their most, as JSON: '{\"image\": 3}'. Default: 255."
    )
    random_mm_bucket_config: str | None = option(
        None,
        "Their sizes: '{(height, width, 1): probability, ...}'. Default: 256x256 and 720x1280.",
    )
    prefix_repetition_prefix_len: int | None = option(
        None, "Tokens of each prefix. Default: 256.", limit=COUNT
    )
    prefix_repetition_suffix_len: int | None = _positive("Tokens after the prefix. Default: 256.")
    prefix_repetition_num_prefixes: int = option(10, "Different prefixes.", limit=POSITIVE)
    prefix_repetition_output_len: int | None = _positive("Tokens to generate. Default: 128.")
    sonnet_input_len: int | None = _positive("Prompt tokens of sonnet. Default: 550.")
    sonnet_output_len: int | None = _positive("Output tokens of sonnet. Default: 150.")
    sonnet_prefix_len: int | None = option(
        None, "Shared prefix tokens of sonnet. Default: 200.", limit=COUNT
    )
    hf_subset: str | None = option(None, "Configuration of a hub data set.")
    hf_split: str = option("train", "Split of a hub data set.")
    trace: Path | None = option(
        None,
        "Replay a recorded trace of Azure, BurstGPT, Mooncake, WEKA or AIPerf, known by its content.",
    )
    trace_start: float = option(0.0, "Seconds into the trace to begin at.", limit=within(ge=0))
    trace_speed: float = option(
        1.0, "Replay speed-up factor.", flag="--trace-speed --speed", limit=RATE
    )
    trace_lengths: Literal["clip", "scale"] | None = option(
        None,
        "clip or scale requests that exceed the context. Default: scale where prompts share blocks.",
        word=str,
    )
    trace_replay: Literal["arrival", "dependency"] = option(
        "arrival",
        "Send requests when they came, or dependency: after the request that they came from and the "
        "recorded gap.",
        flag="--trace-replay --replay",
        parse=lambda word: word.removeprefix("by-"),
        word=str,
    )
    disable_shuffle: bool = option(False, "Keep the file's order.")
    no_oversample: bool = option(False, "Do not repeat prompts when the file has too few.")


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests arrive."""

    PANEL: ClassVar = "Load"
    request_rate: float | None = option(
        None,
        "Requests per second, or inf for all at once. Default: closed loop.",
        limit=within(gt=0),
        common=True,
    )
    burstiness: float = option(
        1.0,
        "Shape of the gamma inter-arrival times: 1 is Poisson, inf constant.",
        limit=within(gt=0),
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        None, "Ramp-up of the rate: linear or exponential.", word=str
    )
    ramp_up_start_rps: float | None = option(
        None, "Requests per second at the start of the ramp.", limit=RATE
    )
    ramp_up_end_rps: float | None = option(None, "Requests per second at its end.", limit=RATE)


@dataclass(frozen=True)
class ConversationOptions:
    """How conversations are built, and when their turns are sent."""

    PANEL: ClassVar = "Conversations"
    multi_turn: bool = option(
        False,
        "Whole ShareGPT threads: one turn after another, with the history.",
    )
    multi_turn_min_turns: int = option(2, "Leave threads with fewer turns out.", limit=POSITIVE)
    multi_turn_max_turns: int | None = _positive("Cut threads after this turn.")
    multi_turn_history: Literal["model", "dataset"] = option(
        "model", "Answers in the history: the model's own, or the dataset's.", word=str
    )
    think_time: str = option(
        "0",
        "Pause before each later turn: seconds, or exponential:MEAN, uniform:LOW:HIGH, "
        "normal:MEAN:STD, lognormal:MEAN:STD.",
    )
    agentic_num_turns: int | None = _positive("Number of turns of an agentic session. Default: 8.")
    agentic_system_len: int | None = _positive("Shared system prompt with tools. Default: 1024.")
    agentic_task_len: int | None = _positive("Tokens of the first task. Default: 64.")
    agentic_tool_output_len: int | None = _positive(
        "Tokens of the first tool result. Default: 128."
    )
    agentic_tool_output_growth: float | None = option(
        None, "Growth of each next tool result. Default: 1.25.", limit=within(gt=0, le=10)
    )
    agentic_output_len: int | None = _positive("Tokens of each answer. Default: 48.")


@dataclass(frozen=True)
class LoadOptions:
    """Load options besides the arrivals."""

    PANEL: ClassVar = "Load"
    max_concurrency: int | None = option(
        None,
        "Maximum requests or conversations in flight. Default: 8; no limit with --request-rate.",
        hidden_flags=("--multi-turn-concurrency",),
        limit=POSITIVE,
        common=True,
    )
    duration: float | None = option(
        None,
        "Length of a pass, such as 60s: the workload repeats, requests in flight at the end are "
        "drained and counted apart.",
        hidden_flags=("--max-seconds",),
        word=str,
        parse=parse_duration,
        limit=RATE,
    )
    num_runs: int = option(
        5,
        "Passes over the workload. Default: 5, in a sweep 1 per load.",
        limit=POSITIVE,
        unset=True,
    )
    max_redone_passes: int = option(
        2, "Disturbed passes that are measured again, at most. Default: 2.", limit=COUNT, unset=True
    )
    num_warmups: int | None = option(
        None, "Warm-up requests. Default: the concurrency.", limit=COUNT
    )
    lora_assignment: Literal["random", "round-robin"] = option(
        "round-robin", "How requests get the adapters of --lora: round-robin or random.", word=str
    )
    ignore_eos: bool = option(True, "Fixed output lengths, so that checkpoints do equal work.")
    temperature: float = option(0.0, "0 is greedy.", limit=within(ge=0))
    slowdown: float = option(
        1.0,
        "Slow every step down by this factor, to prove that a comparison detects it. "
        "The result records it.",
        limit=within(ge=1),
    )
    slowdown_where: Literal["step", "sampler"] = option(
        "step", "Part that --slowdown slows down: step or sampler.", word=str
    )


@dataclass(frozen=True)
class TargetOptions:
    """The server, and the client."""

    PANEL: ClassVar = "Server"
    serve: str | None = option(
        None,
        "Start a server of this kind with the model on a free port, measure it over HTTP, and stop "
        "it: vllm, llama.cpp, transformers, llmopt, or a command line with {port}, {model}, {name} in it.",
        common=True,
    )
    serve_args: str | None = option(
        None, 'Additional arguments for that server, such as "--max-num-seqs 16".'
    )
    serve_program: Path | None = option(
        None, "The executable to start. Default: the server's, beside this Python or on the PATH."
    )
    serve_timeout: float = option(600.0, "Start-up timeout of the server in seconds.", limit=RATE)
    base_url: str | None = option(
        None,
        "Measure the OpenAI-compatible server at this URL instead of a model here; http unless said.",
        word=str,
        parse=http_url,
        common=True,
    )
    backend: str = option(
        "openai",
        "openai (default): completions with prompts as token ids (vllm is the same); openai-chat: "
        "chats; transformers: completions as `transformers serve` takes them; openai-embeddings, "
        "vllm-rerank, vllm-pooling: one response each.",
        unset=True,
    )
    endpoint: str | None = option(None, "Path of the endpoint. Default: the backend's.")
    tokenizer: str | None = option(
        None,
        "Folder, bundled model or hub id whose tokenizer makes the prompts. Default: the model's.",
    )
    api_key: str | None = option(
        None,
        "Sent as a bearer token. Default: OPENAI_API_KEY. Never written to a result.",
        secret=True,
        unset=True,
    )
    header: dict[str, str] = option(
        MISSING,
        "NAME=VALUE for every request; repeatable.",
        factory=dict,
        word=list[str],
        parse=partial(pairs, "--header"),
    )
    extra_body: dict[str, Any] = option(
        MISSING,
        "JSON object with fields to add to every request; null leaves a field out.",
        factory=dict,
        word=str,
        parse=json_object,
    )
    insecure: bool = option(False, "Accept any TLS certificate.")
    server_gpu: str | None = option(
        None,
        "The server's hardware, such as 8xH100, for comparisons. Default: what its metrics say.",
    )
    request_timeout: float = option(
        600.0, "Seconds after which a request counts as failed.", limit=RATE
    )
    client_workers: int | None = _positive(
        "Load-client processes. Default: one per 64 streams, at most half of the cores."
    )
    check_client: bool = option(
        True,
        "Before a run, certify the client: measure its error against a server of known latency "
        "(default). Without --base-url: print that error at 1, 16, 64 and 256 streams, and end.",
        unset=True,
    )
    client_burden_ms: float = option(
        0.0,
        "Starve the client by repeated busy waits of this many ms, to prove that such a "
        "run is not certified. The result records it.",
        limit=within(ge=0, le=1000),
    )


@dataclass(frozen=True)
class MetricOptions:
    """Latency metrics and their limits."""

    PANEL: ClassVar = "Metrics"
    percentile_metrics: tuple[str, ...] = option(
        ("ttft", "tpot", "itl", "e2el"),
        "Metrics at the top level of the result.",
        word=str,
        text="ttft,tpot,itl,e2el",
        parse=listed,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,),
        "Percentiles, such as 50,99.",
        word=str,
        text="99",
        parse=listed,
        limit=each(within(ge=0, le=100)),
    )
    goodput: tuple[str, ...] = option(
        (),
        'Limits, in ms without a unit, such as "ttft:200 tpot:50" or "ttft:1s"; repeatable.',
        word=list[str],
        parse=tuple,
    )


@dataclass(frozen=True)
class QualityOptions:
    """Perplexity, distance from a reference, and tasks."""

    PANEL: ClassVar = "Quality"
    quality: bool = option(True, "Measure perplexity too.")
    quality_tokens: int = option(4096, "Maximum tokens of the text to score.", limit=within(ge=2))
    quality_text: Path | None = option(None, "Text to score. Default: bundled stories.")
    quality_protocol: ProtocolName = option(
        "documents",
        "documents, gptq (WikiText-2 of the papers), strided, or llama.cpp (llama-perplexity).",
        word=str,
    )
    quality_window: int | None = _positive(
        "Tokens per window. Default: the context; gptq and strided at most 2,048, llama.cpp 512."
    )
    quality_stride: int | None = _positive(
        "Tokens between windows of strided. Default: half a window."
    )
    reference: str | None = option(
        None,
        "Model to measure the distance from (KL divergence, top-1 agreement); with --base-url the "
        "URL of its server.",
        common=True,
    )
    quality_full: bool = option(
        False,
        "Beside a reference: KL by domain of text, and flips: multiple-choice answers that change. Its texts "
        "are read whole, whatever --quality-tokens is.",
    )
    quality_depth: tuple[int, ...] = option(
        (),
        "Depths in tokens, such as 4k,32k: KL by position in long documents (with --reference), and "
        "needles, lookups that only the document answers.",
        word=str,
        parse=parse_depths,
        limit=each(within(ge=256)),
    )
    quality_documents: int = option(
        8, "Documents of each depth, generated or of --quality-text.", limit=POSITIVE
    )
    needles: bool = option(True, "Ask needles at every depth from 1k on.")
    quality_kv: tuple[str, ...] = option(
        (),
        "With --quality-depth: types of the KV cache, such as auto,fp8,int8, to compare with one that "
        "rounds nothing.",
        word=str,
        parse=listed,
        limit=each(one_of(*KV_CACHE_DTYPES)),
    )
    tasks: tuple[str, ...] = option(
        (),
        "Tasks to score, NAME[,NAME]: the bundled cloze_stories, cloze_prose, tool_calls, answers "
        "(lengths) and answers_sampled, or lm-eval's (needs llmopt[eval]); a NAME may be a YAML file.",
        word=str,
        parse=listed,
    )
    tool_calls: str | None = option(
        None,
        "Score tool calls: bundled, or a file of BFCL v3 or v4 with its possible_answer folder.",
        metavar="FILE",
    )
    tool_responses: Path | None = option(
        None, "Score these recorded responses to the items of --tool-calls, as JSON lines."
    )
    tasks_limit: int | None = _positive("Maximum samples per task.")
    num_fewshot: int | None = option(
        None, "Examples before each question of the tasks.", limit=COUNT
    )
    apply_chat_template: bool = option(False, "Ask the tasks as conversations (instruct models).")
    fewshot_as_multiturn: bool = option(
        True, "With a chat template: each example is a turn of the conversation."
    )
    system_instruction: str | None = option(None, "System message before the tasks' questions.")


@dataclass(frozen=True)
class RecordOptions:
    """Metadata of the result."""

    PANEL: ClassVar = "Output"
    plan: Path | None = option(
        None, "A plan of `kv-plan --output`: compare its predictions with the measurement."
    )
    gpu_hour_price: float | None = option(
        None,
        "Dollars per hour of this machine: adds the cost per million tokens.",
        limit=within(ge=0, finite=True),
    )
    label: str | None = option(None, "A label in the result.")
    name: str | None = option(None, "Name of the run and its folder. Default: label or model.")
    metadata: dict[str, str] = option(
        MISSING,
        "KEY=VALUE for the result; repeatable.",
        factory=dict,
        word=list[str],
        parse=partial(pairs, "--metadata"),
    )
    save_detailed: bool = option(False, "Per-request arrays in result.json.")
    report: bool = option(
        True, "Write a report, with a roofline and the parts of a step, which are measured for it."
    )


BENCH_GROUPS = (
    DataOptions,
    ConversationOptions,
    ArrivalOptions,
    LoadOptions,
    TargetOptions,
    MetricOptions,
    QualityOptions,
    RecordOptions,
)
