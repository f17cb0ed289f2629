"""`llmopt bench`: speed, quality and memory of a model under a load, as a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import engine as speculation
from .options import server as s
from .options import sweep
from .options import verdict as v
from .options import workload as w
from .options.common import (
    AttentionSinks,
    CpuActivations,
    EnforceEager,
    GpuMemoryUtilization,
    KvCacheDtype,
    Lora,
    ModelArgument,
    ModelOption,
    OverlappedLoop,
    SchedulingPolicy,
    SwapSpace,
    TensorParallelSize,
    Window,
)

if TYPE_CHECKING:
    from ..bench.options.options import BenchOptions
    from ..bench.session.gate_run import Judged, VerdictWanted

LOAD, ENGINE, METRICS, QUALITY, OUTPUT = w.LOAD, "Engine", "Metrics", "Quality", "Output"


def bench(
    model: ModelArgument = None,
    model_option: ModelOption = None,
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
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests in flight. Default: 8; no limit with --request-rate.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_rate: w.RequestRate = None,
    burstiness: w.Burstiness = 1.0,
    ramp_up_strategy: w.RampUpStrategy = None,
    ramp_up_start_rps: w.RampUpStartRps = None,
    ramp_up_end_rps: w.RampUpEndRps = None,
    sweep_concurrency: sweep.SweepConcurrency = None,
    sweep_rate: sweep.SweepRate = None,
    slo: sweep.Slo = None,
    slo_by: sweep.SloBy = "rate",
    slo_share: sweep.SloShare = 0.95,
    num_runs: Annotated[
        int | None,
        typer.Option(
            help="Passes over the workload. Default: 5, in a sweep 1 per load.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_warmups: Annotated[
        int | None,
        typer.Option(
            help="Requests before the clock starts. Default: the concurrency.", rich_help_panel=LOAD
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Fixed output lengths, so that checkpoints do equal work.",
            rich_help_panel=LOAD,
        ),
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=LOAD)] = 0.0,
    seed: w.Seed = 0,
    slowdown: Annotated[
        float,
        typer.Option(
            help="Make every step last this many times as long, to prove that a comparison notices. "
            "The result records it.",
            rich_help_panel=LOAD,
        ),
    ] = 1.0,
    slowdown_where: v.SlowdownWhere = "step",
    serve: s.Serve = None,
    serve_args: s.ServeArgs = None,
    serve_program: s.ServeProgram = None,
    serve_timeout: s.ServeTimeout = 600.0,
    base_url: s.BaseUrl = None,
    backend: s.Backend = None,
    endpoint: s.Endpoint = None,
    tokenizer: s.Tokenizer = None,
    api_key: s.ApiKey = None,
    header: s.Header = None,
    extra_body: s.ExtraBody = None,
    insecure: s.Insecure = False,
    request_timeout: s.RequestTimeout = 600.0,
    client_workers: s.ClientWorkers = None,
    check_client: s.CheckClient = None,
    client_burden_ms: s.ClientBurdenMs = 0.0,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16 or float32.", rich_help_panel=ENGINE)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(help="CPU threads of a step.", rich_help_panel=ENGINE)
    ] = None,
    cpu_activations: CpuActivations = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in a step.", rich_help_panel=ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a step.", rich_help_panel=ENGINE)
    ] = None,
    scheduling_policy: SchedulingPolicy = "fcfs",
    overlapped_loop: OverlappedLoop = False,
    enforce_eager: EnforceEager = False,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a KV block.", rich_help_panel=ENGINE)
    ] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Size of the KV cache.", rich_help_panel=ENGINE)
    ] = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    swap_space: SwapSpace = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV blocks of equal prompt beginnings.",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    tensor_parallel_size: TensorParallelSize = 1,
    window: Window = None,
    attention_sinks: AttentionSinks = 0,
    lora: Lora = None,
    speculative: speculation.Speculative = None,
    draft_model: speculation.DraftModel = None,
    num_speculative_tokens: speculation.NumSpeculativeTokens = 4,
    speculative_tree_width: speculation.SpeculativeTreeWidth = None,
    prompt_lookup_min: speculation.PromptLookupMin = 2,
    prompt_lookup_max: speculation.PromptLookupMax = 4,
    speculative_acceptance: speculation.SpeculativeAcceptance = "coupled",
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics at the top level of the result.", rich_help_panel=METRICS)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, such as 50,99.", rich_help_panel=METRICS)
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help='Limits in ms, such as "ttft:200 tpot:50"; repeatable.', rich_help_panel=METRICS
        ),
    ] = None,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality/--no-quality", help="Score perplexity too.", rich_help_panel=QUALITY
        ),
    ] = True,
    quality_tokens: Annotated[
        int, typer.Option(help="Most tokens to score.", rich_help_panel=QUALITY)
    ] = 4096,
    quality_text: Annotated[
        Path | None,
        typer.Option(help="Text to score. Default: bundled stories.", rich_help_panel=QUALITY),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Model to measure the distance from (KL divergence, top-1 agreement).",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval tasks to score, NAME[,NAME]; a NAME may be the path of a task's YAML file. "
            "Needs llmopt[eval].",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    tasks_limit: Annotated[
        int | None, typer.Option(help="Most samples of each task.", rich_help_panel=QUALITY)
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan of `kv-plan --out`: put what it predicted beside what was measured.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    baseline: v.Baseline = None,
    against: v.Against = None,
    gate: v.Gate = None,
    junit: v.Junit = None,
    benchmark_json: v.BenchmarkJson = None,
    gpu_hour_price: v.GpuHourPrice = None,
    csv: v.Csv = False,
    result_dir: Annotated[
        Path, typer.Option(help="Where run folders are made.", rich_help_panel=OUTPUT)
    ] = Path("runs"),
    label: Annotated[
        str | None, typer.Option("--label", help="A label in the result.", rich_help_panel=OUTPUT)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run and its folder. Default: label or model.", rich_help_panel=OUTPUT
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the result; repeatable.", rich_help_panel=OUTPUT),
    ] = None,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="Per-request arrays in result.json.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result alone, as JSON, on stdout.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Measure a model: latency, throughput, quality and memory, in a folder under runs/."""
    given = dict(locals())
    from ..bench.options.options import BenchOptions, checked
    from ..bench.server.served import served
    from ..bench.session.gate_run import OPTION_NAMES, VerdictWanted, run_judged
    from ..engine.base.units import parse_bytes
    from ..engine.config.adapters import parse_adapters
    from ..quant.base.errors import BadInput
    from .output.console import TerminalProgress

    if check_client and base_url is None and serve is None:
        _print_client_errors(client_workers, client_burden_ms, as_json)
        return
    if model is not None and model_option is not None and model != model_option:
        raise BadInput(f"two models were given, {model!r} and {model_option!r}: give one")
    wanted = VerdictWanted.checked(baseline, against, gate, junit, benchmark_json)
    for own in ("model_option", "result_dir", "as_json", "csv", *OPTION_NAMES, *sweep.OPTION_NAMES):
        del given[own]
    for own in speculation.OPTION_NAMES:
        del given[own]
    given["enable_prefix_caching"] = given.pop("prefix_caching")
    del given["swap_space"]
    given |= {
        "model": model or model_option,
        "goodput": tuple(goodput or ()),
        "metadata": _pairs(metadata or (), "--metadata"),
        "header": _pairs(header or (), "--header"),
        "extra_body": s.extra_body(extra_body),
        "swap_space_bytes": None if swap_space is None else parse_bytes(swap_space),
        "lora": parse_adapters(lora or ()),
        "speculation": speculation.speculation(
            speculative,
            draft_model,
            num_speculative_tokens,
            speculative_tree_width,
            prompt_lookup_min,
            prompt_lookup_max,
            speculative_acceptance,
        ),
    }
    # What nobody asked for stays unset: some data sets bring a default of their own.
    given = {key: value for key, value in given.items() if value is not None}
    options = checked(BenchOptions, given, "option")
    if sweep_concurrency is not None or sweep_rate is not None or slo is not None:
        if wanted is not None:
            raise BadInput(
                "a sweep or a search compares nothing: leave --baseline and --against away"
            )
        sweep.run_several(
            options,
            concurrency=sweep_concurrency,
            rate=sweep_rate,
            slo=slo,
            slo_by=slo_by,
            slo_share=slo_share,
            result_dir=result_dir,
            as_json=as_json,
        )
        return

    progress = TerminalProgress()
    try:
        with served(options, progress) as options:
            judged = run_judged(options, wanted, progress)
    finally:
        progress.finish()
    folder = _report(judged, options, result_dir, as_json, csv)
    if wanted is not None:
        _judge(judged, wanted, folder, as_json)


def _judge(judged: Judged, wanted: VerdictWanted, folder: Path, as_json: bool) -> None:
    """The verdict, its files and its exit code."""
    from ..bench.session.gate_run import write_verdict
    from .compare import print_comparison
    from .output.console import result_console

    write_verdict(judged, wanted, folder)
    if (comparison := judged.comparison) is None:
        return
    out = result_console(as_json)
    print_comparison(comparison, out)
    out.print(f"Comparison: {folder / 'comparison.html'}", markup=False, soft_wrap=True)
    if comparison.outcome.exit_code:
        raise typer.Exit(comparison.outcome.exit_code)


def _report(
    judged: Judged, options: BenchOptions, result_dir: Path, as_json: bool, with_csv: bool
) -> Path:
    """Write the run, and its base where it was measured beside it; print the run."""
    from ..bench.files.run_folder import stamped
    from ..bench.report.console_table import console_table
    from ..bench.session.session import write_run
    from .output.console import emit_json, people, result_console

    run = judged.run
    if not any(one.traces for one in run.passes):
        people.print("interrupted before any request finished: nothing was written")
        raise typer.Exit(130)
    if judged.base is not None:
        name = judged.base.result["llmopt"]["name"]
        write_run(judged.base, stamped(result_dir, name), with_csv=with_csv)
    folder = write_run(run, stamped(result_dir, run.result["llmopt"]["name"]), with_csv=with_csv)
    if as_json:
        emit_json(run.result)
    out = result_console(as_json)
    out.print(
        console_table(run.result, options.percentile_metrics, options.metric_percentiles),
        markup=False,
    )
    out.print(_summary(run.result), markup=False)
    if against := run.result["llmopt"].get("plan"):
        from ..bench.report.plan_residuals import residual_table

        out.print(residual_table(against))
        for difference in against["differs"]:
            people.print(f"not as planned: {difference}", markup=False, soft_wrap=True)
    if run.interrupted:
        people.print(f"interrupted: what finished is in {folder}", markup=False)
        raise typer.Exit(130)
    out.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if run.result["completed"] == 0 or (run.result["llmopt"].get("tasks") or {}).get("error"):
        raise typer.Exit(1)
    return folder


def _summary(result: dict[str, Any]) -> str:
    """Quality, memory and precision of the run in a few lines."""
    from ..bench.page.text import number, percent, size

    ours = result["llmopt"]
    lines = []
    if scored := ours["quality"]:
        line = f"Perplexity {number(scored['perplexity'], 3)} on {scored['num_tokens']:,} tokens"
        if scored["kl_nats"] is not None:
            line += f", KL {scored['kl_nats']:.4f} nats, top-1 {percent(scored['top1_agreement'])}"
        lines.append(line)
    memory = ours["memory"]
    if client := ours.get("client"):
        from ..bench.report.client_words import certificate

        lines.append(certificate(client))
    else:
        lines.append(
            f"Weights {size(memory['weight_bytes'])}, KV cache {size(memory['kv_cache_bytes'])}, "
            f"peak {size(memory['peak_resident_bytes'])}"
        )
        cache, trace = memory["kv_cache"], ours["step_trace"]
        lines.append(
            f"KV cache in {cache['dtype']}: {cache['tokens']:,} tokens of {cache['bytes_per_token']:,} "
            f"bytes, at most {trace['peak_kv_blocks']:,} of {cache['blocks']:,} blocks in use, "
            f"{percent(trace['kv_unfilled_share'])} of the slots in them empty"
        )
    if spread := ours["spread"].get("output_throughput"):
        lines.append(
            f"Smallest change of throughput that {ours['num_runs']} "
            f"{'pass' if ours['num_runs'] == 1 else 'passes'} could have shown: "
            f"{percent(spread['smallest_visible_change'])}"
        )
    return "\n".join(lines)


def _print_client_errors(client_workers: int | None, burden_ms: float, as_json: bool) -> None:
    """The load client against a server of known latency, at each number of streams."""
    from ..bench.client.certify import check_client
    from ..bench.report.client_words import check_table
    from .output.console import TerminalProgress, emit_json, result_console

    progress = TerminalProgress()
    try:
        found, errors = check_client(client_workers, burden=burden_ms / 1000, progress=progress)
    finally:
        progress.finish()
    if as_json:
        emit_json(found)
    result_console(as_json).print(check_table(errors), markup=False, soft_wrap=True)


def _pairs(words: list[str] | tuple[str, ...], option: str) -> dict[str, str]:
    from ..quant.base.errors import BadInput

    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise BadInput(f"{option} {word!r}: write KEY=VALUE")
        found[key] = value
    return found
