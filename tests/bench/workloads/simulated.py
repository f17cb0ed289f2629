"""A workload against the engine's own scheduler and prefix cache, on a clock that a step model drives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmopt.bench.load.load import Dialogue, Dialogues
from llmopt.bench.metrics.trace import RequestTrace
from llmopt.bench.workloads.workload import Workload
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.planner.step_model import StepWork
from llmopt.engine.scheduling.block_pool import BlockPool, PrefixCache
from llmopt.engine.scheduling.request import Request, RequestTimes
from llmopt.engine.scheduling.scheduler import Scheduler
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig
from llmopt.engine.scheduling.step_plan import ScheduledRow

TOKEN = 0
LIMITS = SchedulerConfig(2048, 64, 16, 65536)
BLOCKS = 40_000


class Steps:
    """Seconds of a step: a part of its own, and what its tokens cost."""

    def seconds(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + 0.2 * work.decode_sequences
        return 0.004 + tokens * 4e-5 + work.decode_context_tokens * 1e-8


class Tokens(dict[str, tuple[int]]):
    """One sampled token for any sequence."""

    def __missing__(self, key: str) -> tuple[int]:
        return (TOKEN,)


def work_of(rows: Iterable[ScheduledRow]) -> StepWork:
    """Work of a step of these rows; a row of one token decodes."""
    decode = context = prompt = attended = prompts = 0
    for row in rows:
        start, end = row.start, row.end
        if end - start == 1:
            decode += 1
            context += end
        else:
            prompts += 1
            prompt += end - start
            attended += (end * (end + 1) - start * (start + 1)) // 2
    return StepWork(decode, context, prompt, attended, prompts)


class KeptScheduler(Scheduler):
    """The engine's, with the requests that ended."""

    def __init__(
        self, limits: SchedulerConfig = LIMITS, num_blocks: int = BLOCKS, caches: bool = True
    ) -> None:
        pool = BlockPool(num_blocks)
        super().__init__(limits, pool, PrefixCache(pool, limits.block_size, enabled=caches))
        self.ended: list[Request] = []

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(request, reason, stop_reason)
        self.ended.append(request)


@dataclass(frozen=True, slots=True)
class Served:
    """One request as it was served, or until its client left: its prompt, and times in seconds of the clock."""

    trace: RequestTrace
    prompt: tuple[int, ...]
    cached: int
    left: float | None = None

    @property
    def end(self) -> float:
        return self.trace.ended if self.left is None else self.left


class SimulatedRun:
    """One pass: requests come as the driver sends them, every sampled token is the same."""

    def __init__(self, workload: Workload) -> None:
        self.dialogues = Dialogues(workload, None, None)
        self.scheduler, self.now = KeptScheduler(), 0.0
        self.running: dict[str, tuple[Request, Dialogue, RequestTrace]] = {}
        self.served: list[Served] = []

    def run(self) -> list[Served]:
        while True:
            while dialogue := self.dialogues.take_due(self.now):
                self._send(dialogue)
            due = self.dialogues.next_due()
            if not self.running:
                if due is None:
                    return sorted(self.served, key=lambda one: one.trace.sent)
                self.now = max(self.now, due)
                continue
            plan = self.scheduler.schedule(self.now)
            self.now += Steps().seconds(work_of(plan.rows))
            self.scheduler.update(plan, Tokens(), frozenset(), self.now)
            self._leave()
            self._collect()

    def _send(self, dialogue: Dialogue) -> None:
        number = len(self.running) + len(self.served)
        request = Request(
            sequence_id=f"{dialogue.request_id}/0",
            request_id=dialogue.request_id,
            index=0,
            token_ids=list(dialogue.prompt),
            num_prompt_tokens=len(dialogue.prompt),
            max_tokens=dialogue.output_len,
            params=SamplingParams(ignore_eos=True),
            seed=0,
            order=number,
            times=RequestTimes(self.now),
        )
        self.running[dialogue.request_id] = request, dialogue, dialogue.trace(self.now)
        self.scheduler.add(request)

    def _leave(self) -> None:
        """Abort the requests whose clients lose their patience."""
        for name, (request, dialogue, trace) in list(self.running.items()):
            patience = dialogue.item.cancels(dialogue.turn)
            if patience is None or self.now < trace.sent + patience:
                continue
            if self.scheduler.abort(request.sequence_id) is not None:
                del self.running[name]
                self.served.append(Served(trace, dialogue.prompt, 0, left=self.now))
                self.dialogues.ended(dialogue, self.now)

    def _collect(self) -> None:
        for request in self.scheduler.ended:
            if request.request_id not in self.running:
                continue
            _, dialogue, trace = self.running.pop(request.request_id)
            first = request.times.first_token
            assert first is not None
            trace.chunk_times = [first, self.now]
            trace.chunk_tokens = [1, dialogue.output_len - 1]
            trace.token_ids, trace.success = [TOKEN] * dialogue.output_len, True
            self.served.append(Served(trace, dialogue.prompt, request.num_cached_tokens))
            self.dialogues.answered(dialogue, trace)
        self.scheduler.ended.clear()
