"""Tables of `llmopt doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...engine.base.units import format_gib


def show_findings(findings: dict[str, Any], console: Console) -> None:
    """Print versions, hardware, selected kernels, and the self-test if it ran."""
    console.print(_machine(findings))
    console.print()
    for section in findings["kernels"]:
        console.print(_kernels(section))
    if findings["verdicts"] is not None and findings["verdicts"]["kernels"]:
        console.print(_verdicts(findings["verdicts"]))
    if findings["health"] is not None:
        _show_health(findings["health"], console)


def _machine(findings: Mapping[str, Any]) -> Table:
    versions, cpu, memory = findings["versions"], findings["cpu"], findings["memory"]
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    facts.add_row(
        "processor", f"{cpu['model']}: {cpu['usable_cores']} of {cpu['cores']} cores usable"
    )
    facts.add_row("threads", threads_line(cpu["threads"]))
    facts.add_row(
        "instructions", f"{cpu['capability']} ({', '.join(cpu['features']) or 'no extras'})"
    )
    native = findings["native"]
    extra = " with bfloat16 GEMMs" if native["bfloat16_products"] else ""
    facts.add_row(
        "C kernels",
        f"{native['path']}{extra}, threads of {native['threads']}, in {native['cache']}"
        if native["path"]
        else f"none: {native['reason']}",
    )
    facts.add_row(
        "memory",
        f"{format_gib(memory['available_bytes'])} free of {format_gib(memory['total_bytes'])}",
    )
    for device in findings["cuda"]:
        facts.add_row(
            "CUDA device",
            f"{device['name']}: {format_gib(device['memory_bytes'])}, capability {device['capability']}",
        )
    if findings["mps"] is not None:
        memory_bytes = findings["mps"]["memory_bytes"]
        facts.add_row("Apple GPU", f"{format_gib(memory_bytes)} for Metal, torch's kernels alone")
    if not findings["cuda"]:
        facts.add_row("CUDA devices", "none")
    return facts


def threads_line(threads: Mapping[str, Any]) -> str:
    """The number of threads, of what, and why."""
    of = f"{threads['physical_cores']} physical cores ({threads['hardware_threads']} hardware threads"
    of += f", {threads['nodes']} NUMA nodes" if threads["nodes"] > 1 else ""
    of += f", quota {threads['quota']}" if threads["quota"] else ""
    where = "" if threads["node"] is None else f" on node {threads['node']}"
    steps = ", ".join(f"{n}: {s * 1000:.1f} ms" for n, s in threads["step_seconds"].items())
    why = f"a made-up step on {steps}" if steps else threads["reason"]
    more = ""
    if threads["nodes"] > 1:
        more = f"; --tensor-parallel-size {threads['nodes']} takes every node"
    return f"{threads['chosen']}{where} of {of}); {why}{more}"


def _kernels(section: Mapping[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Kernels on {section['device']} in {section['dtype']}",
        title_justify="left",
    )
    table.add_column("operation")
    table.add_column("chosen")
    table.add_column("others, and why not")
    for choice in section["operations"]:
        refused = [
            f"{other['name']}: {other['refused']}"
            for other in choice["candidates"]
            if other["refused"]
        ]
        table.add_row(
            f"{choice['operation']}\n[dim]{choice['situation']}[/dim]",
            choice["chosen"] or "[red]none[/red]",
            "\n".join(refused),
        )
    return table


def _verdicts(verdicts: Mapping[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Kernels tried on this GPU ({verdicts['file']})",
        title_justify="left",
    )
    for name in ("operation", "kernel", "error", "µs", "verdict"):
        table.add_column(name)
    for each in verdicts["kernels"]:
        error = "" if each["error"] is None else f"{each['error']:.1e}"
        micros = ", ".join(f"{1e6 * seconds:.1f}" for seconds in each["seconds"])
        verdict = "earns its place" if each["dropped"] is None else f"dropped: {each['dropped']}"
        table.add_row(each["case"], each["kernel"], error, micros, verdict)
    return table


def _show_health(health: dict[str, Any], console: Console) -> None:
    for device in health["devices"]:
        roofs = ", ".join(
            f"{name.replace('_', ' ')} {rate / 1e9:,.1f} G"
            for name, rate in device["roofs"].items()
        )
        table = Table(
            box=box.SIMPLE_HEAD,
            title=f"Kernels of {device['device']} against their references ({roofs})",
            title_justify="left",
        )
        for name in ("operation", "kernel", "error", ""):
            table.add_column(name)
        for test in device["tests"]:
            error = test["reason"] or f"{test['error']:.1e} of {test['most']:.0e}"
            verdict = "pass" if test["passed"] else "[red]FAIL[/red]"
            what = f"{test['operation']}\n[dim]{test['situation']}[/dim]"
            table.add_row(what, test["kernel"], error, verdict)
        console.print(table)
