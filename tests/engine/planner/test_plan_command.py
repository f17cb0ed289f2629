"""`llmopt kv-plan`: output, files and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.recipes import MODELS

from ...support.plan_command import answer, call

GIB = 2**30


def test_every_engine_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--model", "gemma-3-27b", "--ctx", "128k")["engines"]
    gib = {name: round(engine["kv_bytes"] / GIB, 3) for name, engine in found.items()}
    assert gib == {"llmopt": 62, "vllm": 14.226, "llama.cpp": 10.609, "transformers": 10.406}


def test_engines_are_listed_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt-oss-20b", "--ctx", "128k", "--kv-dtype", "q8_0"]
    assert call(*options, "--engine", "all") == 0
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    for name in ("llmopt", "vllm", "llama.cpp", "transformers"):
        assert name in words
    assert "does not store q8_0" in words
    assert "llmopt does not store its cache in q8_0" in " ".join(err.split())


def test_the_engine_decides_how_many_fit(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--model", "gemma-3-27b", "--ctx", "128k", "--gpu", "h200", "--tp", "1"]
    ours = answer(capsys, *base, "--engine", "llmopt")
    theirs = answer(capsys, *base, "--engine", "vllm")
    assert ours["max_concurrent_sequences"] < theirs["max_concurrent_sequences"]
    assert (
        theirs["engines"]["vllm"]["max_concurrent_sequences"]
        == (theirs["max_concurrent_sequences"])
    )


def test_replicas_are_in_the_bytes_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    one = answer(capsys, "--model", "qwen3-30b-a3b", "--ctx", "4k", "--tp", "8")
    assert one["kv_bytes_per_rank"] == 4096 * 98_304 // 4
    assert one["kv_bytes_all_ranks"] == 2 * one["kv_bytes_total"] == 2 * 4096 * 98_304
    staged = answer(capsys, "--model", "qwen3-30b-a3b", "--ctx", "4k", "--tp", "4", "--pp", "2")
    assert staged["kv_bytes_per_rank"] == 4096 * 98_304 // 8
    assert staged["kv_bytes_all_ranks"] == staged["kv_bytes_total"]
    assert (staged["tp"], staged["pp"]) == (4, 2)


def test_formulas_come_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--draft-tokens", "4", "--acceptance", "0.8", "--gpu-hour-price", "3"]
    options += ["--api-price-in", "0.1", "--api-price-out", "0.4", "--duty-cycle", "0.5"]
    assert (
        call("--model", "llama-70b", "--ctx", "128k", "--gpu", "h100", *options, "--explain") == 0
    )
    words = " ".join(capsys.readouterr().out.split())
    for part in (
        "= 2 x 80 layers x 8 KV heads x 128 x 2 B (2 bytes) = 327,680 B",
        "= (80 layers x 131,072) x 4096 = 42,949,672,960 B = 40.00 GiB",
        "= 8192 x 2 x (3 x 28672 / 4 + 3 x 8192)",
        "= 9.7 x 1024 x 128256 x 4 = 4.75 GiB",
        "= (1 - 0.8^5) / (1 - 0.8) = 3.36",
        "79.18 GiB x 0.9 - ",
        "break-even at",
        "dollars per million output tokens",
    ):
        assert part in words, part


def test_a_mixture_and_a_checkpoint_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ctx", "4k", "--gpu", "h100", "--engine", "llmopt", "--explain"]
    assert call("--model", "mixtral-8x7b", *options) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "= 8192 x 2 x (2 x (3 x 14336 / 2 + 4096) + 3 x 0 / 2 + 3 x 4096)" in words
    assert "= linear layers " in words and " + experts " in words and " + all-reduce " in words
    assert "no measurement near it" in words
    assert "GB / (3,350 GB/s x 0." in words and "TFLOP / (2 x 989 TFLOP/s x 0." in words
    assert call("--model", "stories3M", "--gpu", "cpu", "--explain") == 0
    assert "sum of data_offsets" in capsys.readouterr().out


def test_a_plan_is_written_as_it_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    printed = answer(capsys, "--model", "llama-8b", "--ctx", "4k", "--out", str(path))
    assert json.loads(path.read_text()) == printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--ctx", "128k"), "of 128k tokens (prompt 96k, answer 32k) in vllm"),
        (("--ctx", "128k", "--output-len", "1000"), "of 128k tokens in vllm"),
        (("--input-len", "500", "--output-len", "100"), "of 600 tokens in vllm"),
        (("--dataset", "azure"), "tokens in vllm"),
    ],
)
def test_how_a_context_divides_is_said_next_to_it(
    options: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--model", "llama-8b", "--gpu", "h100", *options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert line in printed
    assert ("answer 32k" in printed) == (len(options) == 2 and options[0] == "--ctx")


def test_a_plan_is_written_although_nobody_reads_the_screen(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    options = ["--ctx", "128k", "--output", "plan.json", "--html", "plan.html"]  # with a warning
    line = [sys.executable, "-m", "llmopt", "kv-plan", "llama-2-7b", *options]
    done = subprocess.run(line, stdout=writer, stderr=writer, cwd=tmp_path, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "plan.html"}


@pytest.mark.parametrize(
    ("gpu", "sizes"),
    [("2x l40s", (2, 1)), ("L40S x3", (1, 3)), ("4×l40s", (4, 1)), ("12 x L40S", (4, 3))],
)
def test_a_number_of_gpus_is_planned_on_so_many(
    gpu: str, sizes: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    (device,) = answer(capsys, "--model", "llama-70b", "--ctx", "4k", "--gpu", gpu)["gpus"]
    assert (device["gpu"], device["tp"], device["pp"]) == ("L40S", *sizes)


def test_a_plan_goes_into_no_folder_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--out", "--html"):
        assert call("--model", "llama-8b", option, str(tmp_path / "gone" / "plan")) == 2
        assert "no folder" in capsys.readouterr().err


def test_the_page_holds_four_figures_and_every_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    options = ["--model", "gpt-oss-120b", "--ctx", "128k", "--concurrency", "4"]
    assert call(*options, "--html", str(path)) == 0
    page = path.read_text()
    assert page.count("<svg") == 4
    for words in ("Serving gpt-oss-120b", "Fits on 2 x H100 SXM", "ridge 295 FLOP/B", "FLOP"):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert (
        call("--model", "llama-405b", "--gpu-memory", "24GiB", "--tp", "1", "--html", str(path))
        == 0
    )
    page = path.read_text()
    assert "Does not fit on 1 x 24 GiB" in page
    assert page.count("<svg") == 2  # no speed is known


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "held-out rows most like it"),
        ("llmopt", "no measurement near it; a measured one may be "),
    ],
)
def test_a_plan_prints_the_error_of_such_plans(
    engine: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--model", "llama-70b", "--gpu", "h100", "--tp", "4", "--engine", engine) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_context_past_the_limit_warns_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "llama-2-7b", "--ctx", "128k", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["kv_bytes_total"] == 64 * GIB
    assert '"factor": 32.0' in found["warnings"][0]
    assert err == f"warning: {found['warnings'][0]}\n"


def test_a_checkpoint_counts_by_its_headers(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--model", str(MODELS / "stories3M"), "--gpu", "cpu")
    assert (found["weight_bytes"], found["weight_bytes_from"]) == (6_166_016, "headers")
    planned = answer(capsys, "--model", str(MODELS / "stories3M"), "--weights", "int4")
    assert planned["weight_bytes_from"] == "recipe"
    assert planned["checkpoint_file_bytes"] > planned["weight_bytes"]


def test_nothing_is_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call("--model", "llama-70b", "--ctx", "128k", "--gpu", "all", "--engine", "all") == 0
    out, _ = capsys.readouterr()
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "█" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft-tokens", "0"], "--draft-tokens 0"),
        (["--api-price-in", "1"], "need --gpu-hour-price"),
        (["--gpu-hour-price", "3", "--api-price-in", "1"], "together"),
        (["--gpu-hour-price", "3", "--duty-cycle", "2"], "--duty-cycle 2"),
        (["--duty-cycle", "0"], "--duty-cycle 0"),
        (["--gpu-hour-price", "inf"], "--gpu-hour-price inf"),
        (["--request-rate", "0", "--input-len", "8", "--output-len", "8"], "--request-rate 0"),
        (["--weights", ""], "no weight format ''"),
        (["--output-tokens", "4096", "--ctx", "4k"], "--output-tokens 4096"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--max-num-seqs", "0", "--gpu", "cpu"], "--max-num-seqs 0"),
        (["--max-num-batched-tokens", "0", "--gpu", "cpu"], "--max-num-batched-tokens 0"),
        (["--kv-dtype", "int2"], "no KV dtype 'int2'"),
        (["--weights", "int3"], "no weight format 'int3'"),
    ],
)
def test_nonsense_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--model", "llama-8b", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_the_page_is_of_the_gpu_that_the_answers_are_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    options = ["--model", "qwen3-8b", "--ctx", "32k", "--tp", "1", "--gpu", "rtx-4090,h100"]
    found = answer(capsys, *options, "--html", str(path), "--concurrency", "4")
    assert found["answer"]["gpu"] == "H100 SXM"
    page = path.read_text()
    assert "Fits on 1 x H100 SXM." in page and "Does not fit" not in page
    (gpu,) = (one for one in found["gpus"] if one["gpu"] == "H100 SXM")
    for value in (gpu["loaded"]["ttft_ms"], gpu["loaded"]["tpot_ms"]):
        assert f"{value:,.4g}" in page
    assert f"${gpu['dollars_per_million_output_tokens']:,.3g}" in page
