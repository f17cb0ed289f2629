"""The table of layer errors, from manifests made by hand."""

from __future__ import annotations

from pathlib import Path

from llmopt.bench.report.parts import layer_errors, layer_rows, recorded_layer_errors

from tests.support.page_parts import sections_of


def layer_sections(results):
    return sections_of("layer_errors", results, layer_rows=layer_rows)


def manifest(errors: dict[str, float]) -> dict[str, object]:
    return {"modules": [{"module": name, "error": error} for name, error in errors.items()]}


def test_errors_are_gathered_by_layer() -> None:
    awq = manifest(
        {
            "model.layers.0.self_attn.q_proj": 0.01,
            "model.layers.0.mlp.down_proj": 0.03,
            "model.layers.11.mlp.up_proj": 0.05,
            "lm_head": 0.9,
        }
    )
    rtn = manifest({"model.layers.0.mlp.down_proj": 0.04})
    assert layer_errors(awq) == [
        {"layer": 0, "error": 0.02, "worst": "mlp.down_proj"},
        {"layer": 11, "error": 0.05, "worst": "mlp.up_proj"},
    ]
    errors = {"plain": [], "awq": layer_errors(awq), "rtn": layer_errors(rtn)}
    (section,) = layer_sections(
        {name: {"llmopt": {"layer_errors": found}} for name, found in errors.items()}
    )
    (table,) = section.tables
    assert list(table.header) == ["layer", "awq", "rtn"]
    assert [list(row) for row in table.rows] == [
        ["0", "0.02000 (down_proj)", "0.04000 (down_proj)"],
        ["11", "0.05000 (up_proj)", ""],
    ]


def test_a_checkpoint_without_errors_has_no_section(tmp_path: Path) -> None:
    converted = {"modules": [{"module": "model.layers.0.mlp.up_proj", "error": None}]}
    assert layer_errors(converted) == []
    assert recorded_layer_errors(tmp_path) == []
    assert layer_sections({"old": {"llmopt": {}}, "plain": {"llmopt": {"layer_errors": []}}}) == []
