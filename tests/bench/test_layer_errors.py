"""The table of layer errors, from manifests made by hand."""

from __future__ import annotations

from llmopt.bench.layer_errors import layer_errors, layer_table


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
    assert layer_errors(awq) == {0: (0.02, "mlp.down_proj"), 11: (0.05, "mlp.up_proj")}
    table = layer_table({"awq": awq, "rtn": rtn})
    assert list(table.header) == ["layer", "awq", "rtn"]
    assert [list(row) for row in table.rows] == [
        ["0", "0.02000 (down_proj)", "0.04000 (down_proj)"],
        ["11", "0.05000 (up_proj)", ""],
    ]
