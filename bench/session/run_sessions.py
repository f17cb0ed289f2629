"""Running benchmarks from options to records: a single session, or several interleaved ones (paired runs)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from ...quant.base.progress import Progress
from ..options.options import BenchOptions
from ..record.result import BenchRun
from .http_session import HttpSession
from .pass_turns import PassTurns
from .session import BenchSession
from .session_base import Session


def run_bench(options: BenchOptions, progress: Progress | None = None) -> BenchRun:
    """Measure one model, or the server at `base_url`, under one load. Nothing is written.

    An interrupt during the load ends it: the record holds the finished requests and is marked `interrupted`.
    Passes wait for their turn where another process alternates with this one (`PassTurns`).

    Raises:
        BadInput: the model, the data set or an option is invalid, the server names no model, or there is no
            tokenizer for it.
    """
    turns = PassTurns.from_environment()
    with open_session(options, progress) as session:
        session.say_notes()
        for _ in range(options.num_runs):
            turns.wait()
            if not session.run_pass():
                break
        turns.wait()
        run = session.finish()
    run.result["llmopt"]["arms"] = turns.pair
    return run


def run_interleaved(
    options: Sequence[BenchOptions], progress: Progress | None = None
) -> list[BenchRun]:
    """Measure several models or servers under the same load with interleaved passes; all are loaded at once.

    Each round begins with a different one, to balance order effects. An interrupt ends all of them; those
    with at least one pass are returned.
    """
    paired_runs = uuid.uuid4().hex
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(open_session(each, progress, paired_runs)) for each in options
        ]
        sessions[0].say_notes()
        for number in range(options[0].num_runs):
            turn = number % len(sessions)
            if not all(session.run_pass() for session in sessions[turn:] + sessions[:turn]):
                begun = [session for session in sessions if session.has_passes]
                return [session.finish(interrupted=True) for session in begun]
        return [session.finish() for session in sessions]


def open_session(
    options: BenchOptions, progress: Progress | None = None, paired_runs: str | None = None
) -> Session:
    """The session for the model, or for the server at `base_url`."""
    kind = BenchSession if options.base_url is None else HttpSession
    return kind(options, progress, paired_runs=paired_runs)
