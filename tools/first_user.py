"""A first user's question, end to end by the command line: which quantization for this model on this box?

    python tools/first_user.py build/real OUT        # SmolLM2 of tools/real_model.py, 8 prompts, 3 passes
    python tools/first_user.py build/real OUT --walk # the first day alone: every step, and twenty mistakes

From a GGUF and its plain form: six quantizations in three formats, each verified, all benched with quality,
each pair compared, one report. Runs of their own that are too noisy for a limit are measured in turns, with
more passes until the limit is told. It ends with 1 where a pair without a verdict names no condition of the
list or stays without one, or where a number is not the same in a table, a page and the JSON.

The walk is that of `tools/first_day.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from llmopt.bench.record.comparable import CONDITIONS

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.cli_process import run_llmopt
from tools import first_day
from tools.real_model import fetch_gguf, plain_checkpoint

Words = Sequence[str | Path]

CALIBRATED = ("--num-samples", "4", "--seq-len", "128")
QUANTIZATIONS: dict[str, tuple[str, ...]] = {
    "q4km": ("--method", "rtn", "--format", "gguf", "--gguf-type", "Q4_K_M"),
    "q8": ("--method", "rtn", "--format", "gguf", "--gguf-type", "Q8_0"),
    "gptq4": ("--method", "gptq", "--bits", "4", "--group-size", "64"),
    "gptq8": ("--method", "gptq", "--bits", "8", "--group-size", "64"),
    "awq4": ("--method", "awq", "--group-size", "64", "--format", "compressed-tensors"),
    "w8a8": ("--method", "smoothquant", "--format", "compressed-tensors"),
}
LOAD = ("--num-threads", "1", "--max-concurrency", "4")
SHORT = ("--num-prompts", "8", "--output-len", "8", "--num-runs", "3", "--quality-tokens", "512")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
NUMBER = re.compile(r"[+-]?[\d,]*\d(?:\.\d+)?")


def run_wide(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, wide enough for its tables."""
    return run_llmopt(*words, env={**os.environ, "COLUMNS": "240", "HF_HUB_OFFLINE": "1"})


@dataclass
class FirstUser:
    """The commands in a folder, and what was wrong with what they said.

    Attributes:
        load: options of every benchmark.
        more_passes: passes in turns for a pair whose runs do not tell, one try after the other.
        undecided: the pairs that they did not tell either, which the machine decides and no code.
    """

    folder: Path
    load: Words = (*LOAD, *SHORT)
    more_passes: Sequence[int] = (12, 48)
    undecided: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    compared: int = 0

    def go(self, gguf: Path, plain: Path | str, quantizations: Mapping[str, Words]) -> None:
        """Quantize, verify, bench, compare and report."""
        models: dict[str, Path | str] = {"plain": plain, "given": gguf}
        for name, words in quantizations.items():
            suffix = ".gguf" if "gguf" in words else ""
            models[name] = self.folder / f"{name}{suffix}"
            self.call("quantize", plain, *words, *CALIBRATED, "-o", models[name])
            self.call("verify", models[name])
        results = {name: self.bench(name, model, plain) for name, model in models.items()}
        for base, new in combinations(results, 2):
            if self.compare(base, new, results) is None:
                self.settle(base, new, models)
        self.report(results)

    def call(self, *words: str | Path, codes: Sequence[int] = (0,)) -> Any:
        """The output of a command; another exit code than expected ends the script."""
        done = run_wide(*words)
        if done.returncode not in codes:
            sys.exit(f"error: llmopt {' '.join(map(str, words))}: {done.returncode}\n{done.stderr}")
        return done

    def bench(self, name: str, model: Path | str, plain: Path | str) -> dict[str, Any]:
        """The result of a run, whose table and report say what it holds."""
        quality = () if name == "plain" else ("--reference", plain)
        target = self.folder / "runs" / name
        words = ("bench", model, *quality, *self.load, "--name", name, "-o", target)
        printed = self.call(*words).stdout
        result = json.loads((target / "result.json").read_text(encoding="utf-8"))
        page = (target / "report.md").read_text(encoding="utf-8")
        tokens = ("Output token throughput (tok/s)", "Output throughput")
        medians = ("Median TTFT (ms)", "Median TTFT")
        for key, (label, heading) in (("output_throughput", tokens), ("median_ttft_ms", medians)):
            shown = [*re.findall(rf"{re.escape(label)}: +(\S+)", printed)]
            shown += re.findall(rf"\| {heading} \| (\S+) (?:tokens/s|ms) \|", page)
            self.same(f"{name}: {label}", result[key], shown, 2)
        return result

    def compare(self, base: str, new: str, results: Mapping[str, Any]) -> str | None:
        """The verdict on a pair, or the condition that forbids one; its table, page and JSON say the same."""
        folders = [self.folder / "runs" / name for name in (base, new)]
        page, markdown = (self.folder / f"{base}-{new}.{end}" for end in ("html", "md"))
        words = (*folders, "--json", "-o", page, "--markdown", markdown)
        done = self.call("compare", *words, codes=(0, 1, 3))
        found, pair = json.loads(done.stdout), f"{new} against {base}"
        if found["exit_code"] != done.returncode:
            self.problems.append(
                f"{pair}: exit code {done.returncode}, {found['exit_code']} in JSON"
            )
        decided = self.judge(pair, found)
        text = markdown.read_text(encoding="utf-8")
        for aspect in found["aspects"]:
            line = f"{aspect['aspect']:<8} {aspect['verdict']:<12} {aspect['words']}"
            row = f"| {aspect['aspect']} | {aspect['verdict']} | {aspect['words']} |"
            if line not in done.stderr or row not in text:
                self.problems.append(f"{pair}: another verdict on {aspect['aspect']} is shown")
        for delta in found["deltas"]:
            sides = [results[name][delta["key"]] for name in (base, new)]
            self.numbers(f"{pair}: {delta['label']}", delta, sides, done.stderr, text)
            if delta["key"] in ("output_throughput", "median_tpot_ms"):
                figure = page.read_text(encoding="utf-8")
                drawn = all(f">{value:,.4g}<" in figure for value in sides)
                self.expect(f"{pair}: the figure has another {delta['label']}", drawn)
        bytes_of = {"Weights as served": "served_weight_bytes", "KV cache": "kv_cache_bytes"}
        for row in rows(text, "", "base", "new", "change"):
            if row[""] == "KL from the reference (nats)":
                for name, side in ((base, "base"), (new, "new")):
                    value = results[name]["llmopt"]["quality"]["kl_nats"]
                    shown = [] if value is None else [row[side]]
                    self.same(f"{pair}: KL of the {side}", value or 0.0, shown, len(shown))
            if row[""] in bytes_of:
                for value, side in zip(
                    found["memory"][bytes_of[row[""]]], ("base", "new"), strict=True
                ):
                    self.same(f"{pair}: {row['']}", value, [row[side]], 1)
        return decided

    def settle(self, base: str, new: str, models: Mapping[str, Path | str]) -> None:
        """Measure a pair in turns, with more passes until every limit is told."""
        pair = f"{new} against {base}"
        for passes in self.more_passes:
            target = self.folder / "runs" / f"{base}-{new}-{passes}"
            load = (*self.load, "--num-runs", str(passes), "--no-quality", "-o", target)
            words = ("bench", models[new], "--against", models[base], *load)
            self.call(*words, "--result-dir", target.parent, "--name", pair, codes=(0, 1, 3))
            result = json.loads((target / "result.json").read_text(encoding="utf-8"))
            if self.judge(pair, result["llmopt"]["verdict"]):
                return
        self.undecided.append(f"{pair}: {self.more_passes[-1]} passes in turns do not tell")

    def numbers(
        self, what: str, delta: Mapping[str, Any], sides: Sequence[float], printed: str, page: str
    ) -> None:
        """A metric of a pair: JSON against the printed table, the page, the sentence and both results."""
        label = f"{delta['label']} ({delta['unit']})"
        (row,) = (row for row in rows(page, "metric", "base", "new") if row["metric"] == label)
        line = re.search(rf"{re.escape(label)} +(\S+) +(\S+) +([+-]\S+) % +(\S+)", printed)
        cells: Sequence[str] = line.groups() if line else [""] * 4
        for value, side, cell in zip(sides, ("base", "new"), cells[:2], strict=True):
            for known in (value, delta[side]):
                self.same(f"{what} of the {side}", known, [row[side], cell], 2)
        half = (delta["high"] - delta["low"]) * 50
        self.same(f"{what}: change", delta["change"] * 100, [row["change"], cells[2]], 2)
        interval = row["90 % interval"].split(" to ")
        for value, shown in zip((delta["low"], delta["high"]), interval, strict=True):
            self.same(f"{what}: interval", value * 100, [shown], 1)
        said = re.findall(r"± ([\d.]+)%", delta["reason"])
        self.same(f"{what}: ±", half, [cells[3], *said], 1)

    def judge(self, pair: str, found: Mapping[str, Any]) -> str | None:
        """A pair's verdict, or the conditions that forbid one; None: its intervals do not tell."""
        names = [one["aspect"] for one in found["aspects"]]
        self.expect(f"{pair}: verdicts on {names}", names == ["speed", "quality", "memory"])
        outside = set(found["conditions"]) - set(CONDITIONS)
        self.expect(f"{pair}: {outside} are on no list", not outside)
        self.outcomes[pair] = found["outcome"]
        if found["outcome"] != "no verdict":
            return found["outcome"]
        if found["conditions"]:
            self.outcomes[pair] += f": {', '.join(found['conditions'])}"
            return self.outcomes[pair]
        undecided = [one for one in found["deltas"] if one["outcome"] == "no verdict"]
        self.expect(f"{pair}: no verdict, and nothing says why", bool(undecided))
        for one in undecided:
            straddles = one["low"] <= one["change"] <= one["high"]
            named = f"{one['label']} {one['limit']}" in found["decided_by"]
            self.expect(f"{pair}: {one['label']} is undecided by nothing", straddles and named)
        return None

    def report(self, results: Mapping[str, Any]) -> None:
        """One page of all runs, with the numbers of their results."""
        markdown = self.folder / "report.md"
        folders = [self.folder / "runs" / name for name in results]
        page = self.folder / "report.html"
        said = self.call("report", *folders, "-o", page, "--markdown", markdown).stdout
        text = markdown.read_text(encoding="utf-8")
        both = "Fastest" in text and "Not comparable" in text
        self.expect('"Fastest" above "Not comparable"', not both and "()" not in text)
        print(said)
        table = {row["run"]: row for row in rows(text, "run", "weights", "perplexity", "tokens/s")}
        for name, result in results.items():
            row, scored = table[name], result["llmopt"]["quality"]
            values = {
                "tokens/s": result["output_throughput"],
                "TTFT": result["median_ttft_ms"],
                "TPOT": result["median_tpot_ms"],
                "perplexity": scored["perplexity"],
                "KL nats": scored["kl_nats"],
                "top-1": None if scored["kl_nats"] is None else scored["top1_agreement"] * 100,
            }
            for heading, value in values.items():
                if value is not None:
                    self.same(f"report: {heading} of {name}", value, [row[heading]], 1)
            print("  ".join(row.values()))

    def same(self, what: str, value: float, shown: Sequence[str], least: int) -> None:
        """Expect a value, rounded to the digits that each text shows, in at least so many texts."""
        self.expect(f"{what}: shown {len(shown)} times", len(shown) >= least)
        for text in shown:
            self.compared += 1
            self.expect(f"{what}: {text} stands for {value}", agrees(text, value))

    def expect(self, what: str, holds: bool) -> None:
        if not holds:
            self.problems.append(what)


def agrees(text: str, value: float) -> bool:
    """Whether a text such as `1,575.20`, `+3.1 %` or `5.88 MiB` is the value, rounded to its digits."""
    match = NUMBER.search(text)
    if match is None:
        return False
    scale = next((size for unit, size in UNITS.items() if text.endswith(f" {unit}")), 1)
    digits = len(match.group().partition(".")[2])
    return abs(float(match.group().replace(",", "")) - value / scale) <= 0.5001 * 10**-digits


def rows(text: str, *header: str) -> Iterator[dict[str, str]]:
    """The rows of the Markdown tables that have these columns, the first of them first."""
    table: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line[1:-1].split("|")])
            continue
        if table and table[0][0] == header[0] and set(header) <= set(table[0]):
            yield from (dict(zip(table[0], cells, strict=True)) for cells in table[2:])
        table = []


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a first user's question.")
    parser.add_argument("models", type=Path, help="folder of tools/real_model.py")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--walk", action="store_true", help="the first day alone")
    options = parser.parse_args()
    options.output.mkdir(parents=True)
    if options.walk:
        fetch_gguf(options.models)
        if wrong := first_day.walk(
            plain_checkpoint(options.models).resolve(), options.output.resolve()
        ):
            sys.exit("\n".join(wrong))
        return
    user = FirstUser(options.output)
    gguf = fetch_gguf(options.models)
    user.go(gguf, plain_checkpoint(options.models), QUANTIZATIONS)
    for pair, outcome in user.outcomes.items():
        print(f"{pair}: {outcome}")
    print(f"{len(user.outcomes)} pairs, {user.compared} numbers, {len(user.problems)} problems")
    if wrong := [*user.problems, *user.undecided]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
