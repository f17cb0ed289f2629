"""The jobs of a recipe: done one by one or by Ray, they end as the local run does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.bench.quality import positions, scoring
from llmopt.bench.quality.scoring import SharedScores, score_passage
from llmopt.bench.session.quality import quality_passage
from llmopt.bench.studies import jobs
from llmopt.bench.studies.jobs import Job, job_resources, jobs_of, node_kind
from llmopt.bench.studies.recipe import Recipe
from llmopt.bench.studies.recipe_files import JOURNAL_NAME, Stages, read_recipe
from llmopt.bench.studies.recipe_run import job_on_node

from .test_recipe_resume import CAPACITY, RECIPE, llmopt

QUANTIZE = {"quantize": {"method": "rtn"}}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def stages_of(tmp_path: Path, shares: int = 1, **keys: Any) -> Stages:
    variants = keys.pop("variants", [{"name": "one", **QUANTIZE}, {"name": "two", "model": "m"}])
    recipe = Recipe.model_validate({"name": "mine", "variants": variants, **keys})
    return Stages.begin(tmp_path / "out", recipe, shares)


def names(stages: Stages, *, is_here: bool = False) -> list[str]:
    return [job.name for job in jobs_of(stages) if job.is_here == is_here]


def test_each_stage_is_a_job_behind_those_of_its_model(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, shares=2)
    shares = [f"score {of} {number}/2" for of in ("original", "one", "two") for number in (1, 2)]
    benches = ["bench original", "bench one", "bench two"]
    assert names(stages) == ["quantize one", *shares, *benches]
    every = jobs_of(Stages.resume(stages.folder))
    after = {job.name: [before.name for before in job.after(every)] for job in every}
    assert after["score one 2/2"] == ["quantize one"]
    assert after["bench one"] == ["quantize one", "score one 1/2", "score one 2/2"]
    assert after["bench original"] == ["score original 1/2", "score original 2/2"]


@pytest.mark.parametrize(
    ("keys", "here"),
    [
        ({"interleave": True}, ["bench in turns"]),
        # Two at once would disturb each other at one server.
        ({"bench": {"base_url": "http://x"}, "variants": [{"name": "b"}]}, ["bench original"]),
    ],
)
def test_what_one_process_must_measure_is_left_to_the_last(
    tmp_path: Path, keys: dict[str, Any], here: list[str]
) -> None:
    stages = stages_of(tmp_path, shares=2, **keys)
    assert names(stages, is_here=True)[: len(here)] == here
    assert not any(name.startswith("score original") for name in names(stages))


def test_a_job_asks_for_a_node_or_its_gpus() -> None:
    small = {"CPU": 16.0, "memory": 1e9, "node:10.0.0.1": 1.0}
    gpus = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 1e12}
    assert node_kind([small, gpus], on_gpu=False) == {"CPU": 64}
    assert node_kind([small, {**small, "llmopt": 1.0}, gpus], on_gpu=True) == {
        "CPU": 16,
        "llmopt": 1,
    }
    node = node_kind([small, gpus], on_gpu=True)
    pinned = {"accelerator_type:H100": 0.001}
    asked = job_resources(Job("score", "one", device="cuda", gpus=2), node)
    assert asked == {"num_cpus": 16, "num_gpus": 2, "resources": pinned}
    asked = job_resources(Job("bench", "one", device="auto"), node)
    assert asked == {"num_cpus": 64, "num_gpus": 8, "resources": pinned}
    asked = job_resources(Job("quantize", "one", device="cpu"), node)
    assert asked == {"num_cpus": 64, "num_gpus": 0, "resources": {}}
    assert job_resources(Job("score", "one"), {"CPU": 2, "llmopt": 1})["resources"] == {"llmopt": 1}


def test_without_ray_one_line_says_what_to_install(mine: Path, tmp_path: Path) -> None:
    """In a process that cannot import it, whether it is installed here or not."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ray.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join([str(tmp_path / "hidden"), *filter(None, sys.path)])
    for words in (("run", mine), ("best", "stories3M", "--max-kl", "0.05")):
        done = subprocess.run(
            [sys.executable, "-m", "llmopt", *words, "--on", "ray", "--output", tmp_path / "out"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.stderr == "error: --on ray needs the package ray: pip install 'llmopt[ray]'\n"
        assert done.returncode == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--job", "bench one"), "--job is of a run that began"),
        (("--status",), "--status is of a run that began"),
        (("--status", "--job", "bench one"), "give one"),
        (("--score-shares", "0"), "score-shares"),
    ],
)
def test_wrong_words_have_messages(
    mine: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt(mine, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_capacity_has_no_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cap.yaml").write_text(CAPACITY)
    words = ("--score-shares", "2", "--output", tmp_path / "out")
    assert llmopt(tmp_path / "cap.yaml", *words) == 2
    assert "it has no jobs" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_job_by_name(tmp_path: Path) -> None:
    folder = stages_of(tmp_path).folder
    with pytest.raises(BadInput, match="bench none"):
        job_on_node(folder, "bench none")
    with pytest.raises(BadInput, match="do --job 'quantize one' first"):
        job_on_node(folder, "bench one")


def test_a_node_that_does_not_share_the_folder_is_named(tmp_path: Path) -> None:
    place = (jobs.VERSION, str(tmp_path), str(tmp_path / "elsewhere" / JOURNAL_NAME))
    with pytest.raises(BadInput, match=r"does not see .*elsewhere: put --output on storage"):
        jobs._job_on_node(job_on_node, *place, "bench one")
    with pytest.raises(BadInput, match=r"has llmopt .*, this command is 0\.0\.0"):
        jobs._job_on_node(job_on_node, "0.0.0", *place[1:], "bench one")


def test_processes_finish_stages_beside_each_other(tmp_path: Path) -> None:
    first = stages_of(tmp_path)
    second = Stages.resume(first.folder)
    first.finish("bench one")
    second.finish("bench two")
    second.finish("bench one")
    done = json.loads((first.folder / JOURNAL_NAME).read_text())["done"]
    assert done == ["bench one", "bench two"]


def test_who_does_what_another_does_waits_for_its_end(tmp_path: Path) -> None:
    first = stages_of(tmp_path)
    second = Stages.resume(first.folder)
    order: list[str] = []

    def wait() -> None:
        with second.hold("bench one", Silent()):
            order.append("done before" if second.is_done("bench one") else "left")

    with first.hold("bench one", Silent()):
        assert second.is_held("bench one") and not second.is_held("bench two")
        assert "running" in [row["state"] for row in jobs.job_states(second)]
        other = threading.Thread(target=wait)
        other.start()
        first.finish("bench one")
        order.append("first")
    other.join(10)
    assert order == ["first", "done before"]


def test_shared_scores_join_to_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmopt.bench.options.options import BenchOptions
    from llmopt.bench.session.target_sessions import load_engine
    from llmopt.recipes import MODELS

    monkeypatch.setattr(scoring, "TOKENS_BETWEEN_PREFILLS", 250)
    monkeypatch.setattr(positions, "ROW_GROUP", 300)  # several, which end within a group
    options = BenchOptions(num_threads=1, quality_tokens=2000, max_num_batched_tokens=128)
    model, reference = (load_engine(options, MODELS / "stories3M") for _ in range(2))
    passage = quality_passage(options, model.tokenizer, model.max_model_len)
    whole, _ = score_passage(passage, model, reference)
    shared = SharedScores(tmp_path)
    for number in (3, 1, 2):
        assert not shared.holds(passage)
        shared.score(passage, (number, 3), model, reference, Silent())
    assert len(list(tmp_path.iterdir())) > 3
    assert shared.holds(passage)
    assert shared.series(passage).path.read_bytes() == whole.path.read_bytes()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    shared.score(passage, (1, 1), model, reference, Silent())  # nothing is scored again
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def files(folder: Path) -> dict[str, bytes]:
    """Digest what does not depend on time: checkpoints, and scores per position."""
    found = [*(folder / "checkpoints").rglob("*"), *folder.glob("*/quality.parquet")]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.is_file() and "time" not in path.name
    }


def ends(folder: Path) -> dict[str, Any]:
    """The results without times."""
    result = json.loads((folder / "result.json").read_text())
    found = {"exit_code": result["exit_code"], "recipe": result["recipe"]}
    for name in ("original", *result["variants"]):
        run = json.loads((folder / name / "result.json").read_text())
        quality = {key: value for key, value in run["llmopt"]["quality"].items() if key != "speed"}
        found[name] = quality | {"completed": run["completed"]}
    return found | {name: one["verified"] for name, one in result["variants"].items()}


def done(folder: Path) -> list[str]:
    return sorted(json.loads((folder / JOURNAL_NAME).read_text())["done"])


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_jobs_done_one_by_one_end_as_the_local_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second with its scores in two shares: of 20,000 tokens, more than a group."""
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("tokens: 64", "tokens: 20000"))
    here, out = tmp_path / "here", tmp_path / "out"
    assert llmopt(tmp_path / "mine.yaml", "--output", here) == 0
    Stages.begin(out, read_recipe(str(tmp_path / "mine.yaml")), 2)
    early = ["quantize two", "score two 2/2", "score two 1/2", "bench two", "score original 1/2"]
    for name in early:
        assert llmopt("--resume", out, "--job", name) == 0
    capsys.readouterr()
    assert llmopt("--resume", out, "--status", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["jobs"]
    assert {row["job"] for row in rows if row["state"] == "done"} == set(early)
    assert {row["job"] for row in rows if row["machine"]} == {"bench two"}
    assert (out / ".scores").exists()
    before = (out / "two" / "result.json").stat().st_mtime_ns
    assert llmopt("--resume", out) == 0
    assert (out / "two" / "result.json").stat().st_mtime_ns == before
    assert files(out) == files(here) and len(files(here)) > 10
    assert ends(out) == ends(here)
    assert [name for name in done(out) if not name.startswith("score")] == done(here)


EIGHT = (
    RECIPE.partition("variants:")[0]
    + "variants:\n"
    + "".join(
        f"  - {{name: v{number}, quantize: {{method: rtn, bits: {(4, 8)[number % 2]}, "
        f"group_size: {(32, 64)[number // 4]}, ignore: ['layers.{number % 4}.'], "
        "num_samples: 2, seq_len: 64}}\n"
        for number in range(8)
    )
    + "compare: {gate: false}\n"
)


@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_ray_ends_as_the_local_run_though_a_node_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    clusters = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / "mine.yaml").write_text(EIGHT)
    here, out = tmp_path / "here", tmp_path / "out"
    assert llmopt(tmp_path / "mine.yaml", "--output", here) == 0
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = clusters.Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        real, removed = ray.wait, []

        def wait(left: list[Any], **named: Any) -> Any:
            if len(left) == 17 and not removed:  # of 35: in the middle
                removed.append(other)
                cluster.remove_node(other)
            return real(left, **named)

        monkeypatch.setattr(ray, "wait", wait)
        words = ("--on", "ray", "--score-shares", "2", "--output", out)
        assert llmopt(tmp_path / "mine.yaml", *words) == 0
        assert removed
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert files(out) == files(here) and len(files(here)) > 40
    assert ends(out) == ends(here)
    assert [name for name in done(out) if not name.startswith("score")] == done(here)
