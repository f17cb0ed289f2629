"""`llmopt bench freeze`: a workload as a file, to be run again anywhere, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import workload as w


def freeze(
    model: Annotated[
        str | None,
        typer.Argument(help="Whose tokenizer and context. Default: stories3M."),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same as the argument.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write; one JSON object a line.")
    ] = Path("workload.jsonl"),
    max_model_len: Annotated[
        int | None, typer.Option(help="Context to fit. Default: the model's.")
    ] = None,
    dataset: w.Dataset = "sharegpt",
    dataset_path: w.DatasetPath = None,
    num_prompts: w.NumPrompts = None,
    output_len: w.OutputLen = None,
    random_input_len: w.RandomInputLen = None,
    random_output_len: w.RandomOutputLen = None,
    random_prefix_len: w.RandomPrefixLen = 0,
    random_range_ratio: w.RandomRangeRatio = 0.0,
    prefix_repetition_prefix_len: w.PrefixLen = None,
    prefix_repetition_suffix_len: w.SuffixLen = None,
    prefix_repetition_num_prefixes: w.NumPrefixes = 10,
    prefix_repetition_output_len: w.PrefixOutputLen = None,
    sonnet_input_len: w.SonnetInputLen = None,
    sonnet_output_len: w.SonnetOutputLen = None,
    sonnet_prefix_len: w.SonnetPrefixLen = None,
    hf_subset: w.HfSubset = None,
    hf_split: w.HfSplit = "train",
    trace_start: w.TraceStart = 0.0,
    trace_speed: w.TraceSpeed = 1.0,
    trace_lengths: w.TraceLengths = None,
    disable_shuffle: w.DisableShuffle = False,
    no_oversample: w.NoOversample = False,
    request_rate: w.RequestRate = None,
    burstiness: w.Burstiness = 1.0,
    ramp_up_strategy: w.RampUpStrategy = None,
    ramp_up_start_rps: w.RampUpStartRps = None,
    ramp_up_end_rps: w.RampUpEndRps = None,
    seed: w.Seed = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")
    ] = False,
) -> None:
    """Write a workload with its token ids, lengths, arrival times and hash.

    Run it with `llmopt bench --dataset FILE`. The results name the hash.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    from ..bench.options.options import BenchOptions, checked
    from ..bench.workloads.datasets import freeze_workload
    from ..quant.base.errors import BadInput
    from .output.console import emit_json, people, result_console

    if model is not None and model_option is not None and model != model_option:
        raise BadInput(f"two models were given, {model!r} and {model_option!r}: give one")
    for own in ("model_option", "out", "as_json"):
        given.pop(own, None)
    if model_option is not None:
        given["model"] = model_option
    workload = freeze_workload(checked(BenchOptions, given, "option"), out)
    for note in workload.notes:
        people.print(f"{workload.name}: {note}", markup=False, soft_wrap=True)
    found = {
        "path": str(out),
        "sha256": workload.sha256,
        "num_requests": len(workload.items),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "last_arrival_seconds": workload.items[-1].arrival_seconds,
    }
    if as_json:
        emit_json(found)
    result_console(as_json).print(
        f"{out}: {found['num_requests']} requests, {workload.prompt_tokens:,} prompt and "
        f"{workload.output_tokens:,} output tokens, the last due at "
        f"{found['last_arrival_seconds']:.2f} s\nsha256 {workload.sha256}",
        markup=False,
        soft_wrap=True,
    )
