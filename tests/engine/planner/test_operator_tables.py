"""Operator times from measured tables: a small package of the same layout, and the real one where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from llmopt.cli.main import main
from llmopt.engine.planner import operator_tables
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.operator_tables import Curve, OperatorTables, rank_gemms, tables_for
from llmopt.engine.planner.step_model import Parallelism, StepModel, StepWork
from llmopt.engine.planner.weights import recipe_for
from llmopt.quant.base.errors import BadInput

H100 = find_device("h100")
SHAPE = find_model("llama-3.1-8b").shape


def clear() -> None:
    for cached in (operator_tables._folders, operator_tables._curves, operator_tables._columns):
        cached.cache_clear()


def gemm_ms(m: float, n: float, k: float) -> float:
    return 1e-8 * n * k * m**0.5


def written(folder: Path, kind: str, name: str, rows: list[dict[str, Any]], release: str) -> None:
    path = folder / "h100_sxm" / kind / "vllm" / release / f"{name}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """GEMMs, attention and all-reduces by power laws, of which an interpolation in logarithms is exact."""
    about = tmp_path / "aiconfigurator_core-0.12.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.4\nName: aiconfigurator-core\nVersion: 0.12.0\n")
    (tmp_path / "aiconfigurator_core").mkdir()
    (tmp_path / "aiconfigurator_core" / "__init__.py").touch()
    data = tmp_path / "aiconfigurator_core" / "systems" / "data"
    gemms = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": factor * gemm_ms(m, n, k)}
        for dtype, factor in (("bfloat16", 1.0), ("fp8", 0.5))
        for m, n, k in product((1, 8192), (512, 65536), (512, 32768))
    ]
    written(data, "gemm", "gemm", gemms, "0.9.0")
    newer = [row | {"latency": row["latency"] * 2, "kernel_source": "slow"} for row in gemms]
    written(data, "gemm", "gemm", newer + [r | {"kernel_source": "a"} for r in gemms], "0.24.0")
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}
    heads |= {"kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
    decode = [
        heads | {"batch_size": b, "step": s, "latency": 1e-6 * b * s}
        for b, s in product((1, 256), (1, 131071))
    ]
    written(data, "attention", "generation_attention", decode, "0.24.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    clear()
    yield data
    clear()


def tables(name: str = "bf16", tp: int = 1, kv_bytes: float = 2.0) -> OperatorTables | None:
    recipe = recipe_for(name, SHAPE)
    return tables_for(SHAPE, recipe, H100, "vllm", Parallelism(tp), kv_bytes)


def test_a_curve_is_linear_in_logarithms_and_ends_with_the_measurements() -> None:
    curve = Curve((2.0, 8.0), (1.0, 4.0))
    assert [curve.at(x) for x in (1, 2, 4, 8)] == pytest.approx([1, 1, 2, 4])
    assert curve.at(9) is None
    surface = Curve((1.0, 100.0), (Curve((1.0, 10.0), (1.0, 10.0)), Curve((1.0,), (100.0,))))
    assert surface.at(10, 1) == pytest.approx(10)
    assert surface.at(10, 5) is None and surface.at(1, 5) == pytest.approx(5)


@pytest.mark.parametrize("tp", [1, 4])
def test_fused_gemms_of_a_rank_have_all_weights(tp: int) -> None:
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"):
        shape = find_model(name).shape
        whole = {"router", "linear", "head"}
        split = sum(
            t.num_elements * t.count / (tp if t.shard != "whole" and t.role != "router" else 1)
            for t in shape.tensors()
            if t.role in whole
        )
        held = sum(count * n * k for count, n, k, _ in rank_gemms(shape, tp))
        assert held == pytest.approx(split), name


def test_linear_layers_are_the_sum_of_their_gemms(package: Path) -> None:
    found = tables()
    assert found and found.source == "aiconfigurator-core 0.12.0"
    seconds = found.seconds(StepWork.of(16, 1000))
    expected = sum(count * gemm_ms(16, n, k) for count, n, k, _ in rank_gemms(SHAPE, 1))
    assert seconds["linear layers"] == pytest.approx(1e-3 * expected)
    assert seconds["decode attention"] == pytest.approx(1e-3 * 32 * 1e-6 * 16 * 1000)
    assert "all-reduce" not in seconds and "prefill attention" not in seconds
    eight = tables("fp8")
    assert eight and eight.seconds(StepWork.of(16, 1000))["linear layers"] < 0.6 * 1e-3 * expected


def test_an_operator_that_the_tables_do_not_hold_keeps_its_fitted_time(package: Path) -> None:
    model = StepModel.build(
        SHAPE, recipe_for("bf16", SHAPE), H100, model="llama-3.1-8b", engine="vllm", tables=tables()
    )
    sources = {name: source for name, _, source in model.operators(StepWork.of(16, 1000))}
    assert sources["linear layers"] == sources["decode attention"] == "aiconfigurator-core 0.12.0"
    assert sources["host"] == sources["launches"] == "fit"
    long = {name for name, _, source in model.operators(StepWork.of(8, 200_000)) if source != "fit"}
    assert long == {"linear layers"}
    many = [source for _, _, source in model.operators(StepWork.of(0, 0, 10_000))]
    assert set(many) == {"fit"}
    assert tables("int4") is None, "no GEMM of this dtype"
    with_fp8_cache = tables(kv_bytes=1.0)
    assert with_fp8_cache and with_fp8_cache.decode[0][1] is None


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", "--model", "llama-3.1-8b", "--ctx", "4k", "--gpu", "h100", *arguments])
    return stop.value.code  # type: ignore[return-value]


def test_a_plan_says_where_the_time_of_each_operator_is_from(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silicon = ("--engine", "vllm", "--operators", "silicon")
    assert call(*silicon, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    sources = {row["operator"]: row["source"] for row in plan["operators"]}
    assert sources["linear layers"] == "aiconfigurator-core 0.12.0" and sources["host"] == "fit"
    assert plan["loaded"]["error"]["note"].startswith("vllm by tables, hopper")
    assert call(*silicon, "--explain") == 0
    assert "(aiconfigurator-core 0.12.0)" in " ".join(capsys.readouterr().out.split())
    assert call(*silicon, "--weights", "int4") == 0
    assert "no measured times of these linear layers" in " ".join(capsys.readouterr().err.split())
    assert call("--operators", "silicon") == 2
    assert "are of vllm, sglang, trtllm, not of llmopt" in capsys.readouterr().err
    assert call("--operators", "guess") == 2
    assert "--operators 'guess': fit or silicon" in capsys.readouterr().err


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    clear()
    monkeypatch.setattr(operator_tables, "find_spec", lambda name: None)
    with pytest.raises(
        BadInput, match=r"needs the package aiconfigurator-core: pip install 'llmopt\[silicon\]'"
    ):
        tables()


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core")
def test_the_real_tables_hold_a_plain_model() -> None:
    clear()
    for name, tp in (("bf16", 1), ("fp8", 4)):
        found = tables(name, tp)
        assert found
        seconds = found.seconds(StepWork.of(32, 2000, 1000))
        assert {"linear layers", "decode attention", "prefill attention"} <= set(seconds)
        least = 16e9 / tp / (2 if name == "fp8" else 1) / 3.35e12
        assert least < seconds["linear layers"] < 12 * least
        assert ("all-reduce" in seconds) == (tp > 1)
    clear()
