"""Tasks on a backend: the bundled ones, and lm-eval's (EleutherAI harness; `pip install 'llmopt[eval]'`).

`TaskScorer` answers lm-eval's model requests: loglikelihood, rolling loglikelihood, generate-until, chat
templates. Tokens are split, truncated and windowed as in lm-eval's `hf` model, so that its numbers are
reproduced.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...base.errors import BadInput, first_line
from ...base.extras import import_extra
from ...engine.base.sampling_params import SamplingParams
from ..options.options import BenchOptions
from ..quality.chat_items import (
    CHAT_TASKS,
    TOOL_CALLS,
    Chat,
    ChatAnswer,
    TaskScoring,
    answer_chats,
    scored_answers,
)
from ..quality.domains import BUNDLED_TASKS, ChoiceTask, bundled_task, scored_bundled
from ..quality.needles import ANSWER_TOKENS, NEEDLES, REPLY_TOKENS, needle_items, scored_needles
from ..quality.task_items import TaskItems, items_of, metric_rows
from ..quality.tool_calls import BUNDLED, ToolItem, read_responses, read_tool_items, scored_calls

WINDOWS = "tokens and windows as in lm-eval's hf model"
NO_TASKS: dict[str, Any] = {
    "lm_eval_version": None,
    "protocol": "measured requests",
    "limit": None,
    "chat_template": False,
    "error": None,
    "metrics": [],
}


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Resolved tasks with their data loaded; `version` is lm-eval's, None where no task needs it. `chats` are
    the names of tasks of chats, `tools` the items of `tool_calls`."""

    specs: tuple[str, ...] = ()
    manager: Any = None
    version: str | None = None
    bundled: tuple[ChoiceTask, ...] = ()
    chats: tuple[str, ...] = ()
    tools: tuple[ToolItem, ...] = ()
    needles: bool = False


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The record of the tasks of a run (`llmopt.tasks`), and the scores per item (`tasks.parquet`)."""

    record: dict[str, Any]
    items: TaskItems


def prepare_tasks(task_names: Sequence[str], options: BenchOptions | None = None) -> TaskSet:
    """Resolve tasks and load their data, before anything is measured. A word is the name of a bundled task,
    the name or pattern of one of lm-eval's, or the path of a task's YAML file. Data sets on the hub are
    downloaded unless cached. Raises BadInput: lm-eval, a task or its data is missing."""
    names = [word for word in task_names if word in BUNDLED_TASKS]
    chats = tuple(word for word in CHAT_TASKS if word in task_names)
    tools = ()
    if TOOL_CALLS in chats:
        where = BUNDLED if options is None else options.tool_calls or BUNDLED
        tools = tuple(read_tool_items(where))
    others = [word for word in task_names if word not in (*BUNDLED_TASKS, *CHAT_TASKS, NEEDLES)]
    if plain := names or ([] if others else list(chats)):
        for option in ("num_fewshot", "apply_chat_template", "system_instruction"):
            if getattr(options, option, None) and (names or option != "apply_chat_template"):
                flag = f"--{option.replace('_', '-')}"
                raise BadInput(f"{flag} is for lm-eval's tasks: {plain[0]} is asked plainly")
    tasks = _lm_eval_tasks(others) if others else TaskSet()
    bundled, needles = tuple(map(bundled_task, names)), NEEDLES in task_names
    return replace(tasks, bundled=bundled, chats=chats, tools=tools, needles=needles)


def _lm_eval_tasks(task_names: Sequence[str]) -> TaskSet:
    package = import_extra("--tasks", "eval", "lm_eval")
    tasks = import_extra("--tasks", "eval", "lm_eval.tasks")
    paths = [word for word in task_names if word.endswith((".yaml", ".yml"))]
    for path in paths:
        if not Path(path).is_file():
            raise BadInput(f"task {path} is not a file")
    # Indexing the thousands of tasks bundled with lm-eval takes seconds.
    manager = tasks.TaskManager(include_defaults=len(paths) < len(task_names))
    specs: list[str] = []
    for word in task_names:
        names = [word] if word in paths else manager.match_tasks([word])
        if not names:
            raise BadInput(
                f"lm-eval {package.__version__} has no task {word!r}; see lm-eval ls tasks"
            )
        specs += names
    try:
        with redirect_stdout(sys.stderr):
            manager.load(specs)
    except Exception as error:  # templates, data sets and the network raise many exception types
        raise BadInput(f"cannot load {', '.join(task_names)}: {first_line(error)}") from error
    return TaskSet(tuple(specs), manager, package.__version__)


def lm_eval_model(scorer: TaskScorer) -> Any:
    """The scorer as an `lm_eval.api.model.LM`."""
    base: Any = import_module("lm_eval.api.model").LM

    class ScorerModel(base):
        tokenizer_name = str(scorer.tokenizer.name_or_path)

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.rolling_loglikelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.generate([request.args for request in requests])

        def chat_template(self, chat_template: bool | str = False) -> str:
            return scorer.chat_template or ""

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return scorer.apply_chat_template(
                chat_history, add_generation_prompt=add_generation_prompt
            )

    return ScorerModel()


def check_template(options: BenchOptions, backend: TaskBackend, tasks: TaskSet) -> None:
    """Raise BadInput for tasks whose conversations the model cannot render, or that are none."""
    if not (tasks.specs or tasks.bundled or tasks.needles):
        return
    if backend.sends_messages:
        if (tasks.specs or tasks.bundled) and not options.apply_chat_template:
            raise BadInput(
                "--tasks over --backend openai-chat sends conversations: add --apply-chat-template, or take "
                "--backend openai"
            )
    elif options.apply_chat_template and not backend.tokenizer.chat_template:
        raise BadInput(
            f"--apply-chat-template: the tokenizer of {backend.tokenizer.name_or_path} has no chat template"
        )


def run_tasks(tasks: TaskSet, backend: TaskBackend, options: BenchOptions) -> TaskScores:
    """Metrics, standard errors, versions, counts and items' scores; a failing task's is `error`."""
    record: dict[str, Any] = NO_TASKS | {
        "lm_eval_version": tasks.version,
        "protocol": protocol_words(options, backend, tasks),
        "limit": options.tasks_limit,
        "chat_template": options.apply_chat_template,
    }
    scorer = TaskScorer(backend, options.seed)
    try:
        scored = scored_bundled(tasks.bundled, scorer.loglikelihoods, options.tasks_limit)
        for name in tasks.chats:
            scored.append(_scored_chats(name, tasks, backend, options, record))
        if tasks.needles:
            scored += asked_needles(scorer, options)
        rows = [row for scoring in scored for row in scoring.rows]
        samples = {scoring.task: scoring.samples for scoring in scored}
        if tasks.specs:
            with redirect_stdout(sys.stderr):
                outcome = import_module("lm_eval.evaluator").simple_evaluate(
                    model=lm_eval_model(scorer),
                    tasks=list(tasks.specs),
                    task_manager=tasks.manager,
                    limit=options.tasks_limit,
                    num_fewshot=options.num_fewshot,
                    apply_chat_template=options.apply_chat_template,
                    fewshot_as_multiturn=options.apply_chat_template
                    and options.fewshot_as_multiturn,
                    system_instruction=options.system_instruction,
                    log_samples=True,
                )
            rows, samples = rows + metric_rows(outcome), samples | outcome["samples"]
    except Exception as error:  # a task's own code and templates may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        return TaskScores(record | {"error": reason}, TaskItems())
    return TaskScores(record | {"metrics": rows}, items_of(samples, rows))


def _scored_chats(
    name: str,
    tasks: TaskSet,
    backend: TaskBackend,
    options: BenchOptions,
    record: dict[str, Any],
) -> TaskScoring:
    """Score a task of chats; counts of tool calls go to the record."""
    limit = options.tasks_limit
    if name != TOOL_CALLS:
        chats = answer_chats(name, limit)
        return scored_answers(name, chats, backend.converse(chats, "chats of the tasks"))
    items = tasks.tools[:limit]
    if options.tool_responses is None:
        answers = backend.converse([item.chat for item in items], "tool calls")
    else:
        answers = read_responses(options.tool_responses, items)
    scoring, record[TOOL_CALLS] = scored_calls(items, answers)
    return scoring


def with_scores(
    scores: TaskScores | None, rows: Sequence[dict[str, Any]], items: TaskItems
) -> TaskScores | None:
    """The scores of a run with others that it measured."""
    if not rows:
        return scores
    kept = scores or TaskScores(dict(NO_TASKS), TaskItems())
    metrics = [*kept.record["metrics"], *rows]
    return TaskScores(kept.record | {"metrics": metrics}, kept.items.joined(items))


def asked_needles(scorer: TaskScorer, options: BenchOptions) -> list[TaskScoring]:
    """Scores of the needles of `--quality-depth`, asked as completions or with a chat template."""
    depths, documents = options.quality_depth, options.quality_documents
    items = needle_items(scorer.tokenizer, depths, documents=documents, seed=options.seed)
    if scorer.backend.sends_messages or options.apply_chat_template:
        messages = ([{"role": "user", "content": item.message}] for item in items)
        prompts = [scorer.apply_chat_template(message) for message in messages]
        wanted: dict[str, Any] = {"max_gen_toks": REPLY_TOKENS}
    else:
        prompts = [item.prompt for item in items]
        wanted = {"max_gen_toks": ANSWER_TOKENS, "until": ["\n"]}
    return scored_needles(items, scorer.generate([(prompt, wanted) for prompt in prompts]))


def protocol_words(options: BenchOptions, backend: TaskBackend, tasks: TaskSet) -> str:
    """How the tasks were asked, for reports and comparisons."""
    chats = [backend.chat_form] if tasks.chats else []
    if TOOL_CALLS in tasks.chats and options.tool_responses is not None:
        chats.append("tool calls of recorded responses")
    if not (tasks.specs or tasks.bundled or tasks.needles):
        return "; ".join(chats)
    if backend.sends_messages:
        template = "conversations sent as messages: the server applies its chat template"
    elif options.apply_chat_template:
        template = "the tokenizer's chat template"
    else:
        template = "no chat template"
    parts = [WINDOWS, template, *chats]
    if options.apply_chat_template and options.fewshot_as_multiturn:
        parts.append("shots as turns of the conversation")
    shots = options.num_fewshot
    parts.append("the task's own shots" if shots is None else f"{shots} shots")
    if options.system_instruction is not None:
        parts.append(f"system instruction {options.system_instruction!r}")
    return "; ".join(parts)


DEFAULT_NEW_TOKENS = 256
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


class TargetScore(NamedTuple):
    """Natural-log probability of a target token, and whether it is the likeliest."""

    logprob: float
    is_greedy: bool


class TaskWindow(NamedTuple):
    """Input tokens, and the targets predicted at the last `len(targets)` positions."""

    inputs: list[int]
    targets: list[int]


class TaskGeneration(NamedTuple):
    """Token ids to continue; with `messages`, the conversation for a server that applies the template."""

    token_ids: list[int]
    params: SamplingParams
    messages: list[dict[str, str]] | None = None


class TaskBackend(Protocol):
    """Where tasks are scored: an idle engine, or a server. `max_inputs` limits the input tokens of a scored
    window, `longest` a prompt with its generation. `sends_messages`: a server applies the chat template.
    `chat_form` says who renders and parses the chats of `converse`."""

    tokenizer: Any
    max_inputs: int
    longest: int
    sends_messages: bool
    chat_form: str

    def score(self, windows: Sequence[TaskWindow], what: str) -> list[list[TargetScore]]: ...

    def generate(self, requests: Sequence[TaskGeneration], what: str) -> list[str]: ...

    def converse(self, chats: Sequence[Chat], what: str) -> list[ChatAnswer]: ...


def summed(scores: Iterable[TargetScore]) -> tuple[float, bool]:
    """(sum of log-probabilities in nats, whether each token is the likeliest) of a continuation."""
    kept = list(scores)
    return math.fsum(score.logprob for score in kept), all(score.is_greedy for score in kept)


def decode(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """New tokens as text up to a stop string, decoded alone as in lm-eval: a leading space may go."""
    return before_stops(tokenizer.decode(list(token_ids), skip_special_tokens=True), stops)


def before_stops(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


def prefix_token(tokenizer: Any) -> int:
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text with special tokens, without a duplicate BOS."""
    bos = tokenizer.bos_token
    begins = bos is not None and text.startswith(bos)
    return list(tokenizer.encode(text, add_special_tokens=not begins))


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of both, split after the context's tokens; trailing spaces move to the continuation."""
    if not context:
        prefix = prefix_token(tokenizer)
        tokens = list(tokenizer.encode(continuation, add_special_tokens=False))
        return (tokens[:1], tokens[1:]) if tokens[:1] == [prefix] else ([prefix], tokens)
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    begin = encode(tokenizer, kept)
    return begin, encode(tokenizer, kept + continuation)[len(begin) :]


def clipped(context: Sequence[int], continuation: Sequence[int], max_inputs: int) -> TaskWindow:
    """The continuation, its context cut on the left. BadInput: a part is empty, or does not fit."""
    if not context or not continuation:
        raise BadInput("a task gives a context or a continuation without any token")
    if len(continuation) > max_inputs:
        raise BadInput(
            f"a continuation of {len(continuation)} tokens exceeds the {max_inputs} that fit"
        )
    whole = [*context, *continuation]
    return TaskWindow(whole[-(max_inputs + 1) :][:-1], list(continuation))


def rolling_windows(tokens: Sequence[int], prefix: int, max_inputs: int) -> Iterator[TaskWindow]:
    """Windows that predict each token once, after `prefix`, of `max_inputs`; the last one overlaps."""
    whole = [prefix, *tokens]  # tokens[i] is predicted by whole[: i + 1]
    for begin in range(0, len(tokens), max_inputs):
        end = min(begin + max_inputs, len(tokens))
        yield TaskWindow(whole[max(0, end - max_inputs) : end], whole[begin + 1 : end + 1])


def generation_params(wanted: Mapping[str, Any], seed: int) -> SamplingParams:
    """`generation_kwargs` as sampling parameters, greedy by default. BadInput: an unknown key."""
    given = dict(wanted)
    lengths = [given.pop(name, None) for name in LENGTHS]
    until = given.pop("until", None) or []
    temperature = float(given.pop("temperature", 0.0))
    do_sample = given.pop("do_sample", None)
    if do_sample and temperature == 0.0 and "temperature" not in wanted:
        temperature = 1.0
    if given.pop("num_beams", 1) != 1:
        raise BadInput("a task asks for beam search (num_beams), which the engine does not do")
    chosen = {name: given.pop(name) for name in SAMPLING if name in given}
    if given:
        raise BadInput(
            f"a task has the generation_kwargs {', '.join(given)}: unknown to the engine"
        )
    return SamplingParams(
        max_tokens=int(next((n for n in lengths if n is not None), DEFAULT_NEW_TOKENS)),
        temperature=0.0 if do_sample is False else temperature,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        seed=seed,
        **chosen,
    )


class TaskScorer:
    """lm-eval's model requests on a backend."""

    def __init__(self, backend: TaskBackend, seed: int = 0) -> None:
        self.backend, self.tokenizer, self._seed = backend, backend.tokenizer, seed

    @property
    def chat_template(self) -> str | None:
        """Source of the tokenizer's chat template, the default of several; None without one, or where the
        server applies its own. BadInput: several, and none is the default."""
        if self.backend.sends_messages or not self.tokenizer.chat_template:
            return None
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            raise BadInput(f"the tokenizer's chat template: {error}") from error

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, or JSON for a server. BadInput: the template rejects it."""
        if self.backend.sends_messages:
            return json.dumps(messages, ensure_ascii=False)
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # templates raise what they like
            raise BadInput(f"the chat template rejects a conversation: {error}") from error

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Per (context, continuation): log-probability in nats, and whether it is the greedy continuation."""
        split = (encode_pair(self.tokenizer, *pair) for pair in pairs)
        windows = [clipped(*pair, self.backend.max_inputs) for pair in split]
        scored = self.backend.score(windows, "continuations of the tasks")
        return [summed(scores) for scores in scored]

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        prefix, most = prefix_token(self.tokenizer), self.backend.max_inputs
        tokens = (encode(self.tokenizer, text) for text in texts)
        by_text = [list(rolling_windows(ids, prefix, most)) for ids in tokens]
        flat = [window for windows in by_text for window in windows]
        scores = iter(self.backend.score(flat, "texts of the tasks"))
        return [math.fsum(summed(next(scores))[0] for _ in windows) for windows in by_text]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Text for each context, cut on the left, up to a stop. BadInput: no room for new tokens."""
        longest = self.backend.longest
        prompts = []
        for number, (context, wanted) in enumerate(requests):
            params = generation_params(wanted, self._seed + number)
            max_context = longest - (params.max_tokens or 0)
            if max_context < 1:
                raise BadInput(
                    f"a task generates up to {params.max_tokens} tokens; {longest} fit, prompt included"
                )
            if self.backend.sends_messages:
                prompts.append(TaskGeneration([], params, json.loads(context)))
            else:
                tokens = encode(self.tokenizer, context)[-max_context:]
                prompts.append(TaskGeneration(tokens, params))
        return self.backend.generate(prompts, "generations of the tasks")
