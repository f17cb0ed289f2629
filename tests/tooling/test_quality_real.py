"""The parts of the real model's table on the bundled model: scoring, sizes, GGUF files, resuming."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmopt.base.errors import BadInput
from llmopt.bench.quality.passage import ProtocolOptions, read_passage
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import resolve_model
from llmopt.quant.stream.calibration import load_calibration
from llmopt.quant.stream.sources import STORIES

from tools import greedy_mixes
from tools.quality import mixes, real
from tools.quality.cells import Cell, cells
from tools.quality.dequantized import dequantize_checkpoint
from tools.quality.gguf_file import dequantize_gguf, second_moments, write_float_gguf
from tools.quality.scoring import Scorer
from tools.quantizer_times import TASKS, lines

PLAIN = resolve_model("stories3M")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(PLAIN)


@pytest.fixture
def session(tmp_path: Path, tokenizer: Any) -> real.Session:
    passage = read_passage(
        tokenizer, max_model_len=256, num_tokens=256, options=ProtocolOptions("gptq", 128)
    )
    calibration = load_calibration(str(STORIES), tokenizer, num_samples=2, seq_len=32, seed=0)
    given = argparse.Namespace(
        models=tmp_path,
        environments=None,
        scratch=tmp_path,
        output=tmp_path / "table.json",
        only=None,
        again=False,
        calibration=STORIES,
        seed=0,
        threads=1,
        text=Path("evaluation.txt"),
    )
    return real.Session(given, PLAIN, PLAIN, calibration, calibration, passage)


def test_a_model_beside_itself_and_beside_a_worse_one(
    tmp_path: Path, session: real.Session
) -> None:
    scorer = Scorer(PLAIN, session.passage, tmp_path / "references")
    same = scorer.score(PLAIN)
    assert same.kl_nats == pytest.approx(0, abs=1e-6)
    assert same.perplexity == pytest.approx(same.reference_perplexity)
    assert same.top1_agreement == 1
    quantize(QuantizeRequest(PLAIN, tmp_path / "q", method="rtn", bits=3, errors=False))
    stored = dequantize_checkpoint(tmp_path / "q", tmp_path / "plain", PLAIN)
    # A second scorer reads the hidden states that the first one kept.
    worse = Scorer(PLAIN, session.passage, tmp_path / "references").score(tmp_path / "plain")
    assert worse.kl_nats is not None and worse.kl_nats > 0.01
    assert worse.reference_perplexity == pytest.approx(same.perplexity)
    files = sum(path.stat().st_size for path in (tmp_path / "q").glob("*.safetensors"))
    assert 3 < stored.bits_per_weight < 3.5
    assert stored.bytes < files


def test_float_gguf_and_back(tmp_path: Path) -> None:
    request = QuantizeRequest(
        PLAIN, tmp_path / "q8", method="rtn", format="gguf", gguf_type="Q8_0", errors=False
    )
    quantize(request)
    (original,) = (tmp_path / "q8").glob("*.gguf")
    write_float_gguf(PLAIN, original, tmp_path / "f32.gguf")
    stored = dequantize_gguf(tmp_path / "f32.gguf", tmp_path / "again", PLAIN)
    assert stored.bits_per_weight == 32
    plain, again = Checkpoint(PLAIN), Checkpoint(tmp_path / "again")
    assert set(plain.names) == set(again.names)
    for name in plain.names:
        assert torch.equal(plain.tensor(name).float(), again.tensor(name)), name
    assert dequantize_gguf(original, tmp_path / "eight", PLAIN).bits_per_weight == 8.5


def test_second_moments_are_those_of_the_inputs() -> None:
    tokens = torch.arange(32).view(2, 16) + 5
    moments = second_moments(PLAIN, tokens)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(PLAIN, dtype=torch.float32)
    with torch.no_grad():
        inputs = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
    wanted = inputs.double().square().mean((0, 1))
    for kind in ("attn_q", "attn_k", "attn_v"):
        found = torch.tensor(moments[f"blk.0.{kind}.weight"], dtype=torch.float64)
        assert torch.allclose(found, wanted, rtol=1e-5)
    layers = len(model.model.layers)
    assert len(moments) == 7 * layers


def test_names_are_unique() -> None:
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names)


def test_rows_are_kept_and_not_measured_again(
    session: real.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(cell: Cell, *_: Any) -> dict[str, Any]:
        measured.append(cell.name)
        if cell.bits == 3 and measured.count(cell.name) == 1:
            return row_of(cell) | {"error": "killed"}
        return row_of(cell) | {
            "bits_per_weight": 4.3,
            "perplexity": 3.0,
            "reference_perplexity": 2.0,
            "kl_nats": 0.1,
            "kl_interval": (0.1, 0.2),
            "top1_agreement": 0.5,
            "seconds": 1.0,
        }

    def row_of(cell: Cell) -> dict[str, Any]:
        fields = ("name", "package", "method", "grid", "bits", "options")
        return {name: getattr(cell, name) for name in fields}

    monkeypatch.setattr(real, "measure", measure)
    session.given.only = "^llmopt rtn int[34] asym"
    real.fill(session)
    rows = real.fill(session)
    # The one that failed is tried again; peers are not installed here.
    assert measured == [f"llmopt rtn int{bits} asym" for bits in (4, 3, 3)]
    assert [row["kl_nats"] for row in rows] == [0.1, 0.1]
    record = json.loads(session.given.output.read_text())
    assert record["original_perplexity"] == 2.0
    record["token_sha256"] = "another"
    session.given.output.write_text(json.dumps(record))
    with pytest.raises(BadInput, match="other calibration or evaluation tokens"):
        real.fill(session)


@pytest.mark.whole
def test_a_cell_from_worker_to_row(session: real.Session) -> None:
    cell = Cell("llmopt", "gptq", "int4", 4, {"symmetric": False})
    row = real.measure(cell, session, Path(sys.executable))
    assert "error" not in row, row["error"]
    assert 4.2 < row["bits_per_weight"] < 4.5
    assert 0.001 < row["kl_nats"] < 1
    low, high = row["kl_interval"]
    assert low <= row["kl_nats"] <= high
    # Other tokens than the packages were given are no row.
    session.calibration = load_calibration(
        str(STORIES),
        transformers.AutoTokenizer.from_pretrained(PLAIN),
        num_samples=2,
        seq_len=32,
        seed=1,
    )
    assert "other tokens" in real.measure(cell, session, Path(sys.executable))["error"]


def test_our_mixes_have_the_bytes_of_theirs(session: real.Session) -> None:
    def row_of(cell: Cell, size: int, kl: float) -> dict[str, Any]:
        names = ("name", "package", "method", "grid", "bits", "options")
        fields = {name: getattr(cell, name) for name in names}
        return fields | {"file_bytes": size, "kl_nats": kl, "kl_interval": (kl, kl), "seconds": 60}

    theirs = [cell for cell in mixes.peers(50) if cell.bits == 4.25]
    rows = [row_of(cell, 2**20 + at, 0.2) for at, cell in enumerate(theirs)]
    rows.append({key: rows[1][key] for key in ("package", "method", "grid", "bits", "options")})
    rows[-1] |= {"error": "it refused", "bits": 3.5}
    own = list(mixes.ours(rows))
    assert [(cell.grid, cell.options["target_bytes"] - 2**20) for cell in own] == [
        ("int", 1),
        ("gguf", 0),
    ]
    assert own[1].on_twin and not own[0].on_twin
    assert "stats" in session.task(own[0], Path("quantized"))
    rows += [row_of(cell, 2**20, 0.1) for cell in own]
    table = mixes.markdown(real.record_of(session, rows))
    assert table.count("| 0.50 |") == 3
    # Of two, each file has the larger one that is no larger than itself.
    rows.append(row_of(own[0], 2**20 + 2, 0.05))
    table = mixes.markdown(real.record_of(session, rows))
    assert (table.count("| 0.50 |"), table.count("| 0.25 |")) == (2, 1)
    assert "Not run: llm-compressor's HIGGS, gptq at 3.5 bits: it refused" in table


def test_our_mixes_stand_beside_uniform_widths_of_their_bytes() -> None:
    """Between two widths the KL of a uniform one is linear in its logarithm."""

    def row_of(cell: Cell, size: int, kl: float) -> dict[str, Any]:
        names = ("package", "method", "grid", "bits")
        return {name: getattr(cell, name) for name in names} | {"file_bytes": size, "kl_nats": kl}

    widths = zip(mixes.uniform(), (1.0, 0.4, 0.1, 0.05), strict=True)
    rows = [row_of(cell, int(100 * cell.bits), kl) for cell, kl in widths]
    (lean,) = mixes.ours(rows)
    assert (lean.grid, lean.bits, lean.options["target_bytes"]) == ("int", 3, 300)
    assert {"int3", "int3-asym"} < set(lean.options["candidates"])
    rows += [row_of(lean, size, 0.1) for size in (300, 350, 501)]
    held = mixes.beside_uniform(rows)
    assert [(row["file_bytes"], kl) for row, kl in held] == [
        (300, pytest.approx(0.4)),
        (350, pytest.approx(0.2)),
    ]


def test_the_tables_of_a_gguf_file_count_where_they_are_wanted(tmp_path: Path) -> None:
    request = QuantizeRequest(
        PLAIN, tmp_path / "q4", method="rtn", format="gguf", gguf_type="Q4_0", errors=False
    )
    quantize(request)
    (file,) = (tmp_path / "q4").glob("*.gguf")
    linears = dequantize_gguf(file, tmp_path / "linears", PLAIN)
    whole = dequantize_gguf(file, tmp_path / "whole", PLAIN, tables=True)
    assert whole == linears
    assert linears.bytes < linears.file_bytes < file.stat().st_size
    name, plain = "model.embed_tokens.weight", Checkpoint(PLAIN)
    kept, rounded = Checkpoint(tmp_path / "linears"), Checkpoint(tmp_path / "whole")
    assert torch.equal(kept.tensor(name), plain.tensor(name).float())
    assert not torch.equal(rounded.tensor(name), plain.tensor(name).float())


def test_the_names_of_the_mixes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mixes.main(["--list"]) == 0
    assert "autoround autoround int asym 3.5 bits" in capsys.readouterr().out.splitlines()


def test_greedy_mixes_stand_beside_ours_of_their_bytes() -> None:
    scores = {"kl_nats": 0.2, "kl_interval": [0.1, 0.3], "bits_per_weight": 3.3, "file_bytes": 100}
    mixes = [
        scores | {"method": "auto", "grid": grid, "bits": bits, "file_bytes": size}
        for grid, bits, size in (("int", 3, 100), ("gguf", 3.5, 110), ("int", 4.25, 120))
    ]
    rows = [scores | {"kl_nats": 0.4, "target_bytes": size} for size in (100, 110, 120)]
    assert greedy_mixes.markdown({"rows": rows}, {"rows": mixes}).splitlines()[2:] == [
        "| 3.30 | 100 | 0.4 (0.1 to 0.3) | 100 | 0.2 (0.1 to 0.3) | 0.50 |"
    ]


def test_the_quantizer_table_marks_goals_and_says_what_failed() -> None:
    def row(package: str, seconds: float) -> dict[str, Any]:
        cell = next(one for one in TASKS[0].cells if one.package == package)
        seen = {"kl_nats": 0.17, "cpu_seconds": seconds, "peak_bytes": 2**30}
        about = {"name": cell.name, "package": package, "method": cell.method}
        return about | {"options": dict(cell.options), **seen}

    cell = next(one for one in TASKS[1].cells if one.package == "gptqmodel")
    failed = {"name": cell.name, "package": "gptqmodel", "method": "gptq"}
    rows = [row("llmopt", 12.0), row("llamacpp", 6.0), failed | {"options": {}, "error": "refused"}]
    _, _, ours, theirs, refused = lines(rows)
    assert ours.endswith("| 0.17 | 12.0 | 1,024 | 2.00, 1.5 asked: **missed** |")
    assert theirs.endswith("| 0.17 | 6.0 | 1,024 |  |")
    assert "refused" in refused
    assert next(line for line in lines([row("llmopt", 9.0), *rows[1:]]) if "met" in line)
    worse = row("llmopt", 9.0) | {"kl_nats": 0.18}
    assert next(line for line in lines([worse, *rows[1:]]) if "met at more error |" in line)
