"""Workload options: data set and arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The data set, and how requests are built from it."""

    PANEL: ClassVar = "Data"

    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "--dataset-name",
            help="sharegpt, agentic, random, random-mm, prefix_repetition, sonnet, custom, custom_image, "
            "hf, azure, burstgpt, mooncake, or a file. sharegpt without a path is a bundled stand-in; "
            "azure and mooncake have bundled slices.",
        ),
    ] = "sharegpt"
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="The data set's file; with hf OWNER/NAME; hub fetches ShareGPT's own file."
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests or conversations per run. Default: 48, or all of a frozen workload."
        ),
    ] = None
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--sharegpt-output-len",
            "--custom-output-len",
            "--hf-output-len",
            help="Output tokens. Default: the data set's.",
        ),
    ] = None
    random_input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens of random. Default: 1024.")
    ] = None
    random_output_len: Annotated[
        int | None, typer.Option(help="Output tokens of random. Default: 128.")
    ] = None
    random_prefix_len: Annotated[int, typer.Option(help="Shared prefix tokens of random.")] = 0
    random_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Prompts per request of openai-embeddings, documents per query of vllm-rerank. Default: 1."
        ),
    ] = None
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by ± this fraction.")] = (
        0.0
    )
    random_mm_base_items_per_request: Annotated[
        int, typer.Option(help="Images in each request of random-mm.")
    ] = 1
    random_mm_num_mm_items_range_ratio: Annotated[
        float, typer.Option(help="Their number varies by ± this fraction.")
    ] = 0.0
    random_mm_limit_mm_per_prompt: Annotated[
        str | None, typer.Option(help="Their most, as JSON: '{\"image\": 3}'. Default: 255.")
    ] = None
    random_mm_bucket_config: Annotated[
        str | None,
        typer.Option(
            help="Their sizes: '{(height, width, 1): probability, ...}'. Default: 256x256 and 720x1280."
        ),
    ] = None
    prefix_repetition_prefix_len: Annotated[
        int | None, typer.Option(help="Tokens of each prefix. Default: 256.")
    ] = None
    prefix_repetition_suffix_len: Annotated[
        int | None, typer.Option(help="Tokens after the prefix. Default: 256.")
    ] = None
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="Different prefixes.")] = 10
    prefix_repetition_output_len: Annotated[
        int | None, typer.Option(help="Tokens to generate. Default: 128.")
    ] = None
    sonnet_input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens of sonnet. Default: 550.")
    ] = None
    sonnet_output_len: Annotated[
        int | None, typer.Option(help="Output tokens of sonnet. Default: 150.")
    ] = None
    sonnet_prefix_len: Annotated[
        int | None, typer.Option(help="Shared prefix tokens of sonnet. Default: 200.")
    ] = None
    hf_subset: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None
    hf_split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train"
    trace_start: Annotated[float, typer.Option(help="Seconds into the trace to begin at.")] = 0.0
    trace_speed: Annotated[float, typer.Option(help="Replay speed-up factor.")] = 1.0
    trace_lengths: Annotated[
        str | None,
        typer.Option(
            help="clip or scale requests that exceed the context. Default: clip; scale for mooncake."
        ),
    ] = None
    disable_shuffle: Annotated[
        bool, typer.Option("--disable-shuffle", help="Keep the file's order.")
    ] = False
    no_oversample: Annotated[
        bool,
        typer.Option("--no-oversample", help="Do not repeat prompts when the file has too few."),
    ] = False


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """When requests arrive."""

    PANEL: ClassVar = "Load"

    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, or inf for all at once. Default: closed loop."),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of the gamma inter-arrival times: 1 is Poisson, inf constant."),
    ] = 1.0
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help="Ramp-up of the rate: linear or exponential.")
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, typer.Option(help="Requests per second at the start of the ramp.")
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, typer.Option(help="Requests per second at its end.")
    ] = None
