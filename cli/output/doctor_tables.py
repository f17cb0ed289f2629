"""Tables of `llmopt doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...base.processor import NATIVE
from ...bench.machine.overview import EXTRAS
from ...engine.base.units import format_gib
from .console import facts_table, table_of

Row = tuple[str, str]


def show_findings(findings: dict[str, Any], console: Console) -> None:
    """Print versions, hardware and what is wrong; selected kernels and the self-test where they are found."""
    console.print(facts_table(_facts(findings)))
    for problem in findings["problems"]:
        text = f" {problem['what']}; {problem['remedy']}"
        console.print(Text.assemble(("wrong:", "red"), text))
    if not findings["problems"]:
        console.print("Nothing wrong was found.")
    if "kernels" not in findings:
        console.print(
            "--all asks torch: the kernel of each operation and why not the others; "
            "--self-test: whether each is right."
        )
    console.print()
    for section in findings.get("kernels", ()):
        console.print(_kernels(section))
    verdicts = findings.get("verdicts")
    if verdicts is not None and verdicts["kernels"]:
        console.print(_verdicts(verdicts))
    if findings["health"] is not None:
        _show_health(findings["health"], console)


def _facts(findings: Mapping[str, Any]) -> Iterator[Row]:
    cpu, versions = findings["cpu"], findings["versions"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "processor", f"{cpu['model']}: {cpu['usable_cores']} of {cpu['cores']} cores usable"
    forced = "" if cpu["profile"] == NATIVE else f", as LLMOPT_CPU={cpu['profile']} asks"
    yield "default dtype", f"{cpu['default_dtype']}{forced}"
    if cpu["cache_bytes"]:
        sizes = (f"{level} {size // 1024:,} KiB" for level, size in cpu["cache_bytes"].items())
        yield "caches", ", ".join(sizes)
    yield "threads", threads_line(cpu["threads"])
    if "capability" in cpu:
        yield "instructions", f"{cpu['capability']} ({', '.join(cpu['features']) or 'no extras'})"
    if cpu["flags"]:
        yield "flags", " ".join(cpu["flags"])
    yield from _native_facts(findings["native"])
    yield from _memory_and_gpus(findings)
    packages: dict[str, list[str]] = {}
    for missing in findings["missing"]:
        if missing["extra"] is not None:
            packages.setdefault(missing["extra"], []).append(missing["package"])
    for extra, names in packages.items():
        remedy = f"pip install 'llmopt[{extra}]'"
        yield "not installed", f"{', '.join(names)}, for {EXTRAS[extra]}: {remedy}"


def _native_facts(native: Mapping[str, Any]) -> Iterator[Row]:
    if native["path"] is None:
        yield "C kernels", f"none: {native['reason']}"
    elif "threads" in native:
        extra = " with bfloat16 GEMMs" if native["bfloat16_products"] else ""
        where = f"threads of {native['threads']}, in {native['cache']}"
        yield "C kernels", f"{native['path']}{extra}, {where}"
    else:
        where = f"each compiled at its first use, in {native['cache']}"
        yield "C kernels", f"{native['path']}, {where}; torch serves where they do not"
    yield "C compiler", native["compiler"] or "none"


def _memory_and_gpus(findings: Mapping[str, Any]) -> Iterator[Row]:
    memory, nvidia = findings["memory"], findings["nvidia"]
    free, total = (format_gib(memory[name]) for name in ("available_bytes", "total_bytes"))
    yield "memory", f"{free} free of {total}"
    for device in findings.get("cuda", ()):
        size = format_gib(device["memory_bytes"])
        yield "CUDA device", f"{device['name']}: {size}, capability {device['capability']}"
    if findings.get("mps") is not None:
        memory_bytes = findings["mps"]["memory_bytes"]
        yield "Apple GPU", f"{format_gib(memory_bytes)} for Metal, torch's kernels alone"
    if "cuda" in findings and not findings["cuda"]:
        yield "CUDA devices", "none"
    cards = Counter((gpu["name"], gpu["memory_bytes"]) for gpu in nvidia["gpus"])
    for (name, size), count in cards.items():
        size_note = "" if size is None else f", {format_gib(size)} each"
        yield "NVIDIA GPUs", f"{count} {name}{size_note}; driver {nvidia['driver']}"
    if not cards:
        yield "NVIDIA GPUs", nvidia["reason"] or "none"


def threads_line(threads: Mapping[str, Any]) -> str:
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
    title = f"Kernels on {section['device']} in {section['dtype']}"
    table = table_of(("operation", "chosen", "others, and why not"), left=range(3), title=title)
    for choice in section["operations"]:
        others = [other for other in choice["candidates"] if other["refused"]]
        refused = [f"{other['name']}: {other['refused']}" for other in others]
        chosen = choice["chosen"] or Text("none", "red")
        table.add_row(_operation(choice), chosen, "\n".join(refused))
    return table


def _operation(row: Mapping[str, Any]) -> Text:
    return Text.assemble(f"{row['operation']}\n", (row["situation"], "dim"))


def _verdicts(verdicts: Mapping[str, Any]) -> Table:
    header = ("operation", "kernel", "error", "µs", "verdict")
    title = f"Kernels tried on this GPU ({verdicts['file']})"
    table = table_of(header, left=range(5), title=title)
    for trial in verdicts["kernels"]:
        error = "" if trial["error"] is None else f"{trial['error']:.1e}"
        quartiles = (f"{1e6 * low:.1f} to {1e6 * high:.1f}" for low, high in trial["quartiles"])
        micros = ", ".join(quartiles)
        verdict = "earns its place" if trial["dropped"] is None else f"dropped: {trial['dropped']}"
        table.add_row(trial["case"], trial["kernel"], error, micros, verdict)
    return table


def _show_health(health: dict[str, Any], console: Console) -> None:
    for device in health["devices"]:
        roofs = ", ".join(
            f"{name.replace('_', ' ')} {rate / 1e9:,.1f} G"
            for name, rate in device["roofs"].items()
        )
        title = f"Kernels of {device['device']} against their references ({roofs})"
        table = table_of(("operation", "kernel", "error", ""), left=range(4), title=title)
        for test in device["tests"]:
            error = test["reason"] or f"{test['error']:.1e} of {test['most']:.0e}"
            verdict = Text("pass") if test["passed"] else Text("FAIL", "red")
            table.add_row(_operation(test), test["kernel"], error, verdict)
        console.print(table)
