"""`llmopt batch`, run on the bundled model."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import Failure
from llmopt.base.progress import Silent
from llmopt.cli.main import main
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.step import StepResult, StepTimer
from llmopt.engine.scheduling.outputs import RequestOutput
from llmopt.engine.scheduling.step_plan import StepPlan
from llmopt.engine.server.app import create_app
from llmopt.engine.server.batch import OPTIONS, AnswerJournal, BatchRun, read_batch
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from ...support.cli_process import ForkedProcess, run_llmopt
from ...support.live_server import make_engine
from ..server.test_tool_calls import TEMPLATE, USER, WEATHER

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
OPTIONS_OF_RUN = ("--model", "stories260K", "--dtype", "float32", "--num-threads", "1")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**GREEDY, **body}}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["batch", *map(str, words), *OPTIONS_OF_RUN])
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def test_every_endpoint_is_answered_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    file = written(
        tmp_path / "in.jsonl",
        line("long", prompt="Lily", max_tokens=60),
        line("chat", "/v1/chat/completions", messages=USER, model="stories260K"),
        line("tool", "/v1/chat/completions", messages=USER, tools=[WEATHER],
             tool_choice="required", max_tokens=100),
        line("response", "/v1/responses", input="Who is Lily?", max_tokens=None),
        line("vector", "/v1/embeddings", input="Lily"),
        line("wrong", prompt="Lily", top_p=7),
    )  # fmt: skip
    words = (file, "-o", tmp_path / "out.jsonl", "--chat-template", template, "--json")
    code, out, _ = run(capsys, *words)
    result = json.loads(out)
    assert code == 1 and result["num_requests"] == 6 and result["num_failed"] == 2
    assert result["num_resumed"] == 0 and result["total_tokens"] > 100
    found = answers_in(tmp_path / "out.jsonl")
    assert [a["custom_id"] for a in found] == [
        "long",
        "chat",
        "tool",
        "response",
        "vector",
        "wrong",
    ]
    assert [a["response"]["status_code"] for a in found] == [200, 200, 200, 200, 400, 400]
    bodies = [answer["response"]["body"] for answer in found]
    Completion.model_validate(bodies[0], strict=True)
    called = ChatCompletion.model_validate(bodies[2], strict=True)
    assert called.choices[0].message.tool_calls
    assert Response.model_validate(bodies[3]).id == f"resp_{found[3]['response']['request_id']}"
    assert found[4]["error"]["code"] == "unsupported_model"
    assert "top_p" in found[5]["error"]["message"]
    before = (tmp_path / "out.jsonl").read_bytes()
    # Again from nothing: the same bytes, ids of calls included.
    run(capsys, *words, "--restart")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def held_run(journal: Path, num_lines: int, *words: str) -> None:
    """The command, which takes no step while its journal has `num_lines`, so that it cannot end before it is
    killed."""
    step = Engine.step

    def held(engine: Engine) -> list[RequestOutput]:
        while journal.exists() and journal.read_bytes().count(b"\n") >= num_lines:
            time.sleep(0.01)
        return step(engine)

    Engine.step = held  # type: ignore[method-assign]
    sys.argv = ["llmopt", *words]
    main()


@pytest.mark.whole
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    lines = [
        line(f"n{number}", prompt=f"Tom {number}", max_tokens=80, ignore_eos=True)
        for number in range(6)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        file = written(folder / "in.jsonl", *lines)
        os.utime(file, (1_700_000_000, 1_700_000_000))
        words = ("batch", file, "--max-num-seqs", "2", "--json", *OPTIONS_OF_RUN)
        journal = folder / "in.out.jsonl.partial"
        if name == "killed":
            with ForkedProcess(held_run, journal, 2, *map(str, words), env=environment) as process:
                while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.002)
            assert process.returncode == -9 and not (folder / "in.out.jsonl").exists()
            num_kept = journal.read_bytes().count(b"\n")
            assert 2 <= num_kept < 6
        done = run_llmopt(*words, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["num_resumed"] == (num_kept if name == "killed" else 0)  # type: ignore[possibly-undefined]
        outputs[name] = (folder / "in.out.jsonl").read_bytes()
    assert outputs["killed"] == outputs["whole"]


def test_bad_input_is_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", line("a", prompt="x"), line("a", prompt="y"))
    code, out, err = run(capsys, file)
    assert (code, out) == (2, "") and "line 2" in err and "loading" not in err
    file = written(tmp_path / "in.jsonl", line("a", prompt="x"))
    assert "another" in run(capsys, file, "-o", file)[2]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_step_that_fails_fails_its_cause_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lasting: bool
) -> None:
    """One request makes every step fail that it is in, or the engine fails whatever it runs."""
    poison = [7, 7, 7]
    prompts = ["Tom 0", "Tom 1", poison, "Tom 3", "Tom 4", "Tom 5"]
    lines = [line(f"n{number}", prompt=prompt) for number, prompt in enumerate(prompts)]
    batch = read_batch(written(tmp_path / "in.jsonl", *lines), [], "")
    engine = make_engine("stories260K", max_num_seqs=4)
    execute = engine.runner.execute

    def failing(plan: StepPlan, timer: StepTimer) -> StepResult:
        if any([*row.tokens[:3]] == poison or (is_lasting and row.tokens[0]) for row in plan.rows):
            raise RuntimeError("out of luck")
        return execute(plan, timer)

    monkeypatch.setattr(engine.runner, "execute", failing)
    app = create_app(engine, model_name="tiny", options=OPTIONS)
    with AnswerJournal(tmp_path / "out.jsonl", batch.requests, restart=False) as answers:
        run = BatchRun(app, batch, answers, Silent())
        if is_lasting:
            with pytest.raises(Failure, match="the same command goes on"):
                run.run(4)
            return
        run.run(4)
        answers.finish()
    statuses = [answer["response"]["status_code"] for answer in answers_in(tmp_path / "out.jsonl")]
    assert statuses == [200, 200, 500, 200, 200, 200]
