"""Answer a question of `llmopt best`, and print where the time went.

    python -m tools.best_times build/real/SmolLM2-135M-Instruct build/times --max-kl 0.1 --gpu cpu

Prints a line for each stage with its seconds by the clock and of all threads of the process, a line for each
answer, then a table of the finalists. The folder resumes: a second run prints the stages that were left.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from llmopt.bench.best.finalists import find_best
from llmopt.bench.best.target import BestRequest


class Stages:
    """A `Progress` that prints the seconds of each stage when the next one begins."""

    def __init__(self) -> None:
        self._start = self._last = self._now()
        self._stage = "start"

    def start(self, description: str, total: int, unit: str) -> None:
        self.finish()
        self._stage = f"{description} ({total} {unit})"

    def advance(self, count: float = 1) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def note(self, message: str) -> None:
        clock, processor = self._since(self._start)
        print(f"after {clock:.0f} s, {processor:.0f} s of processor: {message}", flush=True)

    def finish(self) -> None:
        clock, processor = self._since(self._last)
        if clock >= 1:
            print(f"{clock:8.1f} {processor:8.1f}  {self._stage}", flush=True)
        self._last, self._stage = self._now(), "between stages"

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), time.process_time()

    def _since(self, then: tuple[float, float]) -> tuple[float, float]:
        now = self._now()
        return now[0] - then[0], now[1] - then[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-kl", type=float)
    parser.add_argument("--gpu")
    parser.add_argument("--loads-in", default="llmopt")
    parser.add_argument("--finalists", type=int, default=10)
    parser.add_argument("--budget", type=float, help="seconds")
    args = vars(parser.parse_args())
    model, folder = args.pop("model"), args.pop("folder")
    print(f"{'clock':>8} {'CPU':>8}  stage (load {os.getloadavg()[0]:.0f})", flush=True)
    stages = Stages()
    decision = find_best(BestRequest(**args), model, folder, stages)
    stages.finish()
    print(f"\n{decision['sentence']}\n")
    expected = {point["id"]: point["expected_kl"] for point in decision["front"]}
    print("| finalist | bytes | expected KL | KL measured | keeps |\n|---|---:|---:|---|---|")
    for finalist in decision["finalists"]:
        kl, predicted = finalist["kl"], expected[finalist["id"]]
        shown = "" if predicted is None else f"{predicted:.3g}"
        interval = f"{kl['value']:.3g} ({kl['low']:.3g} to {kl['high']:.3g})"
        print(
            f"| {finalist['id']} | {finalist['bytes']:,} | {shown} | {interval} | {finalist['keeps']} |"
        )


if __name__ == "__main__":
    main()
