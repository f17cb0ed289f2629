"""lm-eval's three request types against transformers, its windows against its own, and a task end to end."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.quality.task_items import metric_rows
from llmopt.bench.report.parts import shared
from llmopt.bench.session.sweep import SweepTarget
from llmopt.bench.session.task_backends import EngineBackend
from llmopt.bench.session.tasks import (
    TaskScorer,
    TaskWindow,
    clipped,
    decode,
    encode,
    encode_pair,
    generation_params,
    lm_eval_model,
    prepare_tasks,
    rolling_windows,
)
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM

from tests.support.live_server import make_engine, running
from tests.support.page_parts import tables_of

FOLDER = MODELS / "stories3M"
STORIES = [one.strip() for one in (DATA / "evaluation.txt").read_text().split("\n\n")]
CHAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONCE = "time, there was a little girl named Lily"
LONG = " ".join(STORIES[:6])  # more than the context of 512 tokens


def llmopt(*words: str | Path) -> int:
    """The exit code of `llmopt bench`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


@pytest.fixture(scope="module")
def scorer() -> TaskScorer:
    engine = Engine(EngineConfig(FOLDER, dtype="float32", device="cpu", num_threads=1))
    return TaskScorer(EngineBackend(engine))


@pytest.fixture(scope="module")
def reference() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def expected(reference: Any, inputs: list[int], targets: list[int]) -> tuple[float, bool]:
    """The sum of log-softmax at the targets, and whether each is the argmax."""
    scores = reference(torch.tensor([inputs])).logits[0, -len(targets) :].log_softmax(-1)
    wanted = torch.tensor(targets)
    total = scores.gather(1, wanted[:, None]).double().sum()
    return float(total), bool((scores.argmax(-1) == wanted).all())


def test_loglikelihoods_equal_those_of_transformers(scorer: TaskScorer, reference: Any) -> None:
    pairs = [(story[:120], story[120:160]) for story in STORIES[:6]]
    pairs += [("Once upon a", " time"), ("Once upon a time ", "there was"), ("", STORIES[0][:60])]
    found = scorer.loglikelihoods(pairs)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        begin, rest = encode_pair(scorer.tokenizer, context, continuation)
        assert encode(scorer.tokenizer, context + continuation)[len(begin) :] == rest
        wanted = expected(reference, (begin + rest)[:-1], rest)
        assert logprob == pytest.approx(wanted[0], abs=2e-3)
        assert is_greedy == wanted[1]
    assert found[6][1] and {greedy for _, greedy in found} == {True, False}


def test_a_context_that_is_too_long_loses_its_beginning(scorer: TaskScorer, reference: Any) -> None:
    context, continuation = LONG, STORIES[6][:50]
    begin, rest = encode_pair(scorer.tokenizer, context, continuation)
    assert len(begin) > scorer.backend.max_inputs == 512
    ((logprob, _),) = scorer.loglikelihoods([(context, continuation)])
    wanted, _ = expected(reference, (begin + rest)[-513:][:-1], rest)
    assert logprob == pytest.approx(wanted, abs=2e-3)


def test_clipping_by_hand() -> None:
    assert clipped([1, 2, 3], [4, 5], 4) == TaskWindow([1, 2, 3, 4], [4, 5])
    assert clipped([1, 2, 3], [4, 5], 3) == TaskWindow([2, 3, 4], [4, 5])
    with pytest.raises(BadInput, match="exceeds the 1 that fit"):
        clipped([1], [4, 5], 1)
    with pytest.raises(BadInput, match="without any token"):
        clipped([1], [], 4)


def test_rolling_windows_are_those_of_the_documentation_of_lm_eval() -> None:
    assert list(rolling_windows(range(10), -1, 4)) == [
        TaskWindow([-1, 0, 1, 2], [0, 1, 2, 3]),
        TaskWindow([3, 4, 5, 6], [4, 5, 6, 7]),
        TaskWindow([5, 6, 7, 8], [8, 9]),
    ]
    assert list(rolling_windows([7], 0, 4)) == [TaskWindow([0], [7])]
    assert list(rolling_windows([], 0, 4)) == []


def test_rolling_windows_are_those_of_lm_eval_itself() -> None:
    pytest.importorskip("lm_eval")
    theirs = import_module("lm_eval.utils").get_rolling_token_windows
    for length in range(1, 40):
        tokens = list(range(length))
        for size in range(1, 9):
            wanted = theirs(token_list=tokens, prefix_token=-1, max_seq_len=size, context_len=1)
            assert list(rolling_windows(tokens, -1, size)) == [TaskWindow(*one) for one in wanted]


def test_a_long_text_is_scored_in_windows(scorer: TaskScorer, reference: Any) -> None:
    texts = [STORIES[0], LONG]
    found = scorer.rolling_loglikelihoods(texts)
    split = [list(rolling_windows(encode(scorer.tokenizer, text), 1, 512)) for text in texts]
    for windows, logprob in zip(split, found, strict=True):
        wanted = sum(expected(reference, *one)[0] for one in windows)
        assert logprob == pytest.approx(wanted, rel=1e-5)
    assert [len(windows) > 1 for windows in split] == [False, True]


def test_generation_is_greedy_and_stops(scorer: TaskScorer, reference: Any) -> None:
    contexts = ["Once upon a time", "Tom and his dog"]
    free = scorer.generate([(one, {"max_gen_toks": 24}) for one in contexts])
    for context, text in zip(contexts, free, strict=True):
        ids = torch.tensor([encode(scorer.tokenizer, context)])
        wanted = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert text and text == decode(scorer.tokenizer, wanted.tolist())
    stopped = scorer.generate([(one, {"until": ["."], "max_gen_toks": 60}) for one in contexts])
    assert all(text and "." not in text for text in stopped)
    assert [
        one.startswith(two) or two.startswith(one) for one, two in zip(free, stopped, strict=True)
    ] == [True, True]
    # A context too long for 60 more tokens is truncated on the left.
    (text,) = scorer.generate([(LONG + " Once upon a", {"until": ".", "max_gen_toks": 60})])
    ids = torch.tensor([encode(scorer.tokenizer, LONG + " Once upon a")[-452:]])
    wanted = reference.generate(ids, max_new_tokens=60, do_sample=False)[0, 452:]
    assert text and text == decode(scorer.tokenizer, wanted.tolist()).split(".")[0]
    with pytest.raises(BadInput, match="600 tokens; 512 fit"):
        scorer.generate([("a", {"max_gen_toks": 600})])


def test_generation_kwargs() -> None:
    plain = generation_params({"until": "\n"}, 0)
    assert (plain.temperature, plain.max_tokens, plain.stop) == (0.0, 256, ("\n",))
    drawn = generation_params({"do_sample": True, "top_p": 0.9, "max_new_tokens": 7}, 5)
    assert (drawn.temperature, drawn.top_p, drawn.max_tokens, drawn.seed) == (1.0, 0.9, 7, 5)
    greedy = generation_params({"do_sample": False, "temperature": 0.7, "until": [""]}, 0)
    assert greedy.temperature == 0.0 and greedy.stop == ()
    with pytest.raises(BadInput, match="beam"):
        generation_params({"num_beams": 4}, 0)
    with pytest.raises(BadInput, match="penalty_alpha"):
        generation_params({"penalty_alpha": 0.6}, 0)


def test_what_cannot_score_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("tasks_limit", 3), ("num_fewshot", 1), ("apply_chat_template", True)):
        with pytest.raises(BadInput, match=f"--{name.replace('_', '-')} is for --tasks"):
            checked(BenchOptions, {name: value}, "option")
    options = checked(BenchOptions, {"tasks": "a, b"}, "option")
    assert options.tasks == ("a", "b")
    with pytest.raises(BadInput, match="scores no tasks"):
        SweepTarget(options, "rate")
    monkeypatch.setitem(import_module("sys").modules, "lm_eval", None)
    with pytest.raises(BadInput, match=r"pip install 'llmopt\[eval\]'"):
        prepare_tasks(["hellaswag"])


def test_rows_of_a_result_and_their_table() -> None:
    outcome = {
        "results": {
            "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4},
            "two": {"em,strict": 0.25, "em_stderr,strict": "N/A"},
        },
        "groups": {"both": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "versions": {"one": 1.0, "two": "2", "both": None},
        "n-shot": {"one": 0, "two": 5},
        "n-samples": {"one": {"original": 9, "effective": 4}},
        "higher_is_better": {"one": {"acc": True}},
    }
    rows = metric_rows(outcome)
    assert [(row["task"], row["value"], row["stderr"]) for row in rows] == [
        ("one", 0.5, 0.1),
        ("two", 0.25, None),
        ("both", 0.5, 0.1),
    ]
    assert rows[0]["num_samples"] == 4 and rows[1]["num_fewshot"] == 5 and rows[2]["is_group"]
    part = {"lm_eval_version": "0", "protocol": "p", "limit": 4, "error": None, "metrics": rows}
    runs = {name: {"llmopt": {"tasks": part}} for name in ("a", "b")}
    runs["c"] = {"llmopt": {}}
    (table,) = tables_of("task_scores", runs, **shared())
    assert [row[:4] for row in table.rows][:3] == [
        ["one", "acc", "a", "0.5000 ± 0.1000"],
        ["one", "acc", "b", "0.5000 ± 0.1000"],
        ["two", "em (strict)", "a", "0.2500"],
    ]
    assert tables_of("task_scores", {"c": {"llmopt": {}}}, **shared()) == []


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], body: str) -> Path:
    """A task's YAML and its data, with nothing to fetch."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        f"test_split: test\n{body}metadata:\n  version: 1.0\n"
    )
    return path


def story_tasks(folder: Path) -> list[Path]:
    """A multiple-choice task, the perplexity of stories, and a generation task."""
    rng = random.Random(0)
    parts = [(story[:150], story[150:162]) for story in STORIES[:24]]
    rows = []
    for number, (context, ending) in enumerate(parts):
        others = [one for place, (_, one) in enumerate(parts) if place != number]
        choices = [ending, *rng.sample(others, 3)]
        rng.shuffle(choices)
        rows.append({"context": context, "choices": choices, "gold": choices.index(ending)})
    choice = (
        "output_type: multiple_choice\ndoc_to_text: context\ntarget_delimiter: ''\n"
        "doc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n"
        "  - metric: acc\n  - metric: acc_norm\n"
    )
    rolling = (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\nmetric_list:\n"
        "  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"
    )
    generation = (
        "output_type: generate_until\ndoc_to_text: context\ndoc_to_target: answer\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 40\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    texts = [{"text": one} for one in (*STORIES[:4], LONG)]
    asked = [{"context": "Once upon a", "answer": text} for text in (ONCE, "another")]
    return [
        write_task(folder, "endings", rows, choice),
        write_task(folder, "whole_stories", texts, rolling),
        write_task(folder, "beginnings", asked, generation),
    ]


def test_a_local_task_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    endings = story_tasks(tmp_path)[0]
    runs = tmp_path / "runs"
    code = llmopt(
        "stories3M", "--num-prompts", "4", "--output-len", "4", "--num-runs", "1", "--num-threads",
        "1", "--no-quality", "--tasks", endings, "--tasks-limit", "12", "--result-dir", runs,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0 and "endings acc:" in said
    (folder,) = runs.iterdir()
    part = json.loads((folder / "result.json").read_text())["llmopt"]["tasks"]
    assert part["error"] is None and part["limit"] == 12 and part["lm_eval_version"]
    acc, norm = part["metrics"]
    assert (acc["task"], acc["metric"], norm["metric"]) == ("endings", "acc", "acc_norm")
    assert acc["version"] == 1.0 and acc["num_samples"] == 12 and 0 < acc["stderr"] < 0.2
    assert acc["value"] > 0.5  # a chance of a quarter
    for name in ("report.md", "report.html"):
        assert "endings" in (folder / name).read_text()
    with pytest.raises(BadInput, match="no task 'no-such-task'"):
        prepare_tasks(["no-such-task"])
    with pytest.raises(BadInput, match="is not a file"):
        prepare_tasks([str(tmp_path / "none.yaml")])


def test_metrics_equal_those_of_lm_evals_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scorer: TaskScorer
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("lm_eval.models.huggingface")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    evaluate = import_module("lm_eval.evaluator").simple_evaluate
    paths = [str(path) for path in story_tasks(tmp_path)]
    manager = prepare_tasks(paths).manager
    own = evaluate(model=lm_eval_model(scorer), tasks=paths, task_manager=manager)
    arguments = {"pretrained": str(FOLDER), "dtype": "float32", "device": "cpu"}
    theirs = evaluate(model="hf", model_args=arguments, tasks=paths, task_manager=manager)
    pairs = list(zip(metric_rows(own), metric_rows(theirs), strict=True))
    assert len(pairs) == 6
    assert pairs[-1][0]["value"] == 0.5
    for mine, other in pairs:
        print(mine["task"], mine["metric"], mine["value"], other["value"], mine["stderr"])
        assert mine["value"] == pytest.approx(other["value"], rel=1e-6)
        for key in ("task", "metric", "version", "num_samples", "num_fewshot"):
            assert mine[key] == other[key]
    for mine, other in zip(samples(own), samples(theirs), strict=True):
        assert mine == pytest.approx(other, abs=2e-3)


def sums_task(folder: Path) -> Path:
    """A generation task in the shape of gsm8k: shots, stop strings, and a filter that extracts the answer."""
    rows = [
        {"question": f"What is {n} and {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(6)
    ]
    body = (
        "fewshot_split: test\nnum_fewshot: 2\noutput_type: generate_until\n"
        "doc_to_text: 'Question: {{question}}\\nAnswer:'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  until: ['Question:']\n  max_gen_toks: 12\n"
        "filter_list:\n  - name: strict-match\n    filter:\n"
        "      - function: regex\n        regex_pattern: '#### (\\-?[0-9]+)'\n"
        "      - function: take_first\n"
        "  - name: none\n    filter:\n      - function: take_first\n"
        "metric_list:\n  - metric: exact_match\n    regexes_to_ignore: ['#### ']\n"
    )
    return write_task(folder, "sums", rows, body)


def test_a_generation_task_over_http_equals_that_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scorer: TaskScorer
) -> None:
    pytest.importorskip("lm_eval")
    from llmopt.bench.load.address import Address, find_served
    from llmopt.bench.session.task_backends import ServedBackend
    from llmopt.bench.session.tasks import run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    paths = [str(sums_task(tmp_path)), *map(str, story_tasks(tmp_path)[:1])]
    tasks = prepare_tasks(paths)
    with running(make_engine()) as server:
        named = {"tasks": ",".join(paths), "base_url": server.url, "tokenizer": "stories3M"}
        for more in ({}, {"apply_chat_template": True, "system_instruction": "Count."}):
            options = checked(BenchOptions, {**named, **more}, "option")
            address = Address.parse(server.url)
            client = address.json_client(30)
            remote = ServedBackend(
                client, address, find_served(options, address), backend="openai", concurrency=4
            )
            for backend in (scorer.backend, remote):
                backend.tokenizer.chat_template = CHAT
            here, there = (run_tasks(tasks, each, options) for each in (scorer.backend, remote))
            assert here.record["error"] is None, here.record["error"]
            assert [row["value"] for row in there.record["metrics"]] == [
                row["value"] for row in here.record["metrics"]
            ]
            assert {row["filter"] for row in here.record["metrics"]} == {"strict-match", "none"}
            rows = [
                place for place, task in enumerate(here.items.columns["task"]) if task == "sums"
            ]
            assert len(rows) == 12 and all(
                here.items.columns["response"][row] == there.items.columns["response"][row]
                for row in rows
            )
            assert here.record["chat_template"] == bool(more)
            assert "chat template; shots as turns" in here.record["protocol"] or not more


def samples(outcome: Any) -> list[float]:
    """Every log-likelihood of the choices."""
    return [float(one[0]) for row in outcome["samples"]["endings"] for one in row["filtered_resps"]]
