from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.methods.base import InputStatistics
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import SplitExperts
from llmopt.quant.stream import layer_stream
from llmopt.quant.stream.calls import States
from llmopt.quant.stream.chain import HIDDEN as HIDDEN_STATES
from llmopt.quant.stream.layer_stream import LayerStream, compute_dtype
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from ...support.family_models import HIDDEN, MAPPED, OTHERS, make_model, save_model, token_ids


class Streamed(NamedTuple):
    model: Any
    stream: LayerStream


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Streamed]:
    """A tiny model of a family in memory, and a prepared stream of the same from disk."""
    made: dict[str, Streamed] = {}

    def make(name: str) -> Streamed:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = save_model(name, folder)
            checkpoint = Checkpoint(folder)
            stream = LayerStream(checkpoint, architecture_of(checkpoint))
            stream.prepare(token_ids())
            made[name] = Streamed(model, stream)
        return made[name]

    return make


def outputs(stream: LayerStream, index: int, states: States) -> torch.Tensor:
    """What a loaded layer of a plain chain gives."""
    return stream.run(index, states).tensors[HIDDEN_STATES]


def whole_run(model: Any, stream: LayerStream, ids: torch.Tensor) -> list[torch.Tensor]:
    """Inputs of the first layer and outputs of all layers when transformers runs the whole model."""
    layers = model.get_submodule(stream.prefix(0).rpartition(".")[0])
    states: list[torch.Tensor] = []

    def keep(_: Any, __: Any, result: Any) -> None:
        states.append(result[0] if isinstance(result, tuple) else result)

    def keep_first(_: Any, arguments: Any, named: Any) -> None:
        states.append(arguments[0] if arguments else named["hidden_states"])

    handles = [layer.register_forward_hook(keep) for layer in layers]
    handles.append(layers[0].register_forward_pre_hook(keep_first, with_kwargs=True))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize("name", [*MAPPED, *OTHERS])
def test_layers_one_by_one_give_what_the_whole_model_gives(
    streamed: Callable[[str], Streamed], name: str
) -> None:
    model, stream = streamed(name)
    ids = token_ids()
    expected = whole_run(model, stream, ids)
    states = stream.embed(ids)
    assert torch.equal(states.tensors[HIDDEN_STATES], expected[0])
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states)
        stream.unload(index)
        hidden = states.tensors[HIDDEN_STATES]
        assert (hidden - expected[index + 1]).abs().max() < 2e-6 * expected[index + 1].abs().max()
        assert (hidden - expected[index]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "phi3", "gpt_oss", "bloom"])
def test_statistics_are_those_of_the_inputs_in_the_whole_model(
    streamed: Callable[[str], Streamed], name: str
) -> None:
    model, stream = streamed(name)
    ids = token_ids(samples=4, seed=2)
    states = stream.embed(ids)
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        measured = stream.measure(index, states)
        states = stream.run(index, states)
        stream.unload(index)
        expected = brute_force(model, stream, index, ids)
        family = stream.family(index)
        assert measured.keys() == {*family.linears, *family.routers}
        assert expected.keys() == measured.keys()
        for linear, record in measured.items():
            assert record.num_tokens == expected[linear].num_tokens
            scale = expected[linear].gram.abs().max().clamp(min=1e-3)
            assert (record.gram - expected[linear].gram).abs().max() < 1e-5 * scale
            assert (record.abs_max - expected[linear].abs_max).abs().max() < 1e-5


def brute_force(
    model: Any, stream: LayerStream, index: int, ids: torch.Tensor
) -> dict[str, InputStatistics]:
    """Statistics of one layer from hooks in the whole model; of experts from what their block gets."""
    layer = model.get_submodule(stream.prefix(index))
    seen: dict[str, list[torch.Tensor]] = {}
    routed: list[tuple[Any, ...]] = []

    def keep(path: str) -> Callable[..., None]:
        def hook(_: Any, arguments: Any, named: Any) -> None:
            seen.setdefault(path, []).append((arguments or tuple(named.values()))[0].detach())

        return hook

    handles = []
    for path, module in layer.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.nn.Linear) or (
            kind.endswith("Router") and "Experts" not in kind
        ):
            handles.append(module.register_forward_pre_hook(keep(path), with_kwargs=True))
        if kind.endswith("Experts"):
            handles.append(
                module.register_forward_pre_hook(lambda _, inputs: routed.append(inputs))
            )
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    if routed and index in range(stream.num_layers) and "gpt_oss" not in model.config.model_type:
        experts = next(m for m in layer.modules() if type(m).__name__.endswith("Experts"))
        for tokens, chosen, _ in routed:
            for number in range(experts.num_experts):
                own = tokens[(chosen == number).any(dim=-1)].detach()
                gate, up = (own @ experts.gate_up_proj[number].T.detach()).chunk(2, dim=-1)
                for leaf in ("gate_proj", "up_proj"):
                    seen.setdefault(f"mlp.experts.{number}.{leaf}", []).append(own)
                between = torch.nn.functional.silu(gate) * up
                seen.setdefault(f"mlp.experts.{number}.down_proj", []).append(between)
    if model.config.model_type == "mixtral":
        leaves = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for path in [path for path in seen if path.startswith("mlp.")]:
            head, _, leaf = path.replace("mlp.", "block_sparse_moe.", 1).rpartition(".")
            seen[f"{head}.{leaves.get(leaf, leaf)}"] = seen.pop(path)
    wanted = {*stream.family(index).linears, *stream.family(index).routers}
    records: dict[str, InputStatistics] = {}
    for path, inputs in seen.items():
        if path in wanted:
            records[path] = InputStatistics(inputs[0].shape[-1])
            for tokens in inputs:
                records[path].add(tokens)
    return records


def test_an_expert_without_tokens_has_zero_statistics(
    streamed: Callable[[str], Streamed],
) -> None:
    _, stream = streamed("mixtral")
    stream.load(0, stream.tensors(0))
    same = token_ids(samples=1)[:, :1].repeat(1, token_ids().shape[1])
    measured = stream.measure(0, stream.embed(same))
    stream.unload(0)
    experts = {
        name: record for name, record in measured.items() if ".experts." in name and "w1" in name
    }
    reached = [record.num_tokens for record in experts.values()]
    assert sum(reached) == 2 * token_ids().shape[1]
    idle = [record for record in experts.values() if record.num_tokens == 0]
    assert len(idle) >= 1
    assert all(not bool(record.gram.any()) and not bool(record.abs_max.any()) for record in idle)


def test_only_some_linears_are_measured(streamed: Callable[[str], Streamed]) -> None:
    _, stream = streamed("mixtral")
    states = stream.embed(token_ids())
    stream.load(0, stream.tensors(0))
    all_of_them = stream.measure(0, states)
    name = "block_sparse_moe.experts.1.w2"
    some = stream.measure(0, states, only=[name])
    stream.unload(0)
    assert some.keys() == {name}
    assert torch.equal(some[name].gram, all_of_them[name].gram)


def test_replaced_weights_change_what_comes_after_and_are_put_back(
    streamed: Callable[[str], Streamed],
) -> None:
    _, stream = streamed("deepseek_v3")
    states = stream.embed(token_ids())
    tensors = stream.tensors(1)
    stream.load(1, tensors)
    before = stream.measure(1, states)
    output = outputs(stream, 1, states)
    name = "mlp.shared_experts.up_proj"
    replaced = {name: 2 * tensors[f"{name}.weight"]}
    after = stream.measure(1, states, replaced=replaced)
    down = "mlp.shared_experts.down_proj"
    assert torch.allclose(after[down].gram, 4 * before[down].gram)
    assert torch.equal(after[name].gram, before[name].gram)
    assert torch.equal(outputs(stream, 1, states), output)
    stream.substitute(1, replaced)
    assert not torch.equal(outputs(stream, 1, states), output)
    assert torch.equal(stream.weights(1, [name])[name], replaced[name])
    stream.unload(1)


def test_outputs_may_take_the_place_of_the_inputs(streamed: Callable[[str], Streamed]) -> None:
    _, stream = streamed("gemma3")
    states = stream.embed(token_ids(samples=5))
    stream.load(0, stream.tensors(0))
    expected = outputs(stream, 0, states)
    before = states.tensors[HIDDEN_STATES]
    assert stream.run(0, states, in_place=True).tensors[HIDDEN_STATES] is before
    stream.unload(0)
    assert torch.equal(before, expected)


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "gptj"])
def test_the_inputs_of_the_output_projection(
    streamed: Callable[[str], Streamed], name: str
) -> None:
    model, stream = streamed(name)
    ids = token_ids()
    read: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    states = whole_run(model, stream, ids)
    handle.remove()
    inputs = torch.cat(list(stream.head_inputs(States(ids, {HIDDEN_STATES: states[-1]}))))
    assert (inputs - read[0]).abs().max() < 1e-6


def test_no_samples_give_no_states(streamed: Callable[[str], Streamed]) -> None:
    _, stream = streamed("llama")
    states = stream.embed(token_ids(samples=0))
    assert states.tensors[HIDDEN_STATES].shape == (0, token_ids().shape[1], HIDDEN)


def test_split_experts_compute_what_fused_ones_do() -> None:
    layer = make_model("mixtral").model.layers[0]
    fused = layer.mlp.experts
    hidden = torch.randn(11, HIDDEN)
    chosen = torch.tensor([[0, 3], [1, 2], [3, 1]] * 3 + [[2, 0], [0, 1]])
    weights = torch.rand(11, 2)
    gate_up, down = fused.gate_up_proj.detach().clone(), fused.down_proj.detach().clone()
    with torch.no_grad():
        expected = fused(hidden, chosen, weights)
        split = SplitExperts(fused, ("w1", "w3", "w2"))
        state = {}
        for number in range(4):
            state[f"{number}.w1.weight"], state[f"{number}.w3.weight"] = gate_up[number].chunk(2)
            state[f"{number}.w2.weight"] = down[number]
        split.load_state_dict(state)
        assert (split(hidden, chosen, weights) - expected).abs().max() < 1e-6


def test_a_tensor_too_many_or_too_few_is_named(streamed: Callable[[str], Streamed]) -> None:
    _, stream = streamed("qwen3")
    tensors = stream.tensors(0)
    with pytest.raises(BadInput, match=r"model\.layers\.0 does not fit.*q_norm"):
        stream.load(0, {name: t for name, t in tensors.items() if "q_norm" not in name})
    with pytest.raises(BadInput, match=r"model\.layers\.0 does not fit.*surplus"):
        stream.load(0, tensors | {"mlp.surplus.weight": torch.zeros(2, 2)})


def test_transposed_weights_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(BadInput, match=r"'gpt2'.*transposed"):
        architecture_of(Checkpoint(tmp_path))


def test_names_without_the_prefix_of_the_model_are_found(tmp_path: Path) -> None:
    """BLOOM's own checkpoints leave out `transformer.`."""
    model = save_model("bloom", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    assert stream.prefix(1) == "h.1"
    ids = token_ids()
    stream.prepare(ids)
    stream.load(0, stream.tensors(0))
    hidden = outputs(stream, 0, stream.embed(ids))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states[1]
    assert (hidden - expected).abs().max() < 1e-5


def test_buffers_of_old_checkpoints_are_no_surplus(tmp_path: Path) -> None:
    save_model("gpt_neox", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    tensors = stream.tensors(0)
    stream.load(0, tensors)
    name = "attention.dense"
    assert torch.equal(stream.weights(0, [name])[name], tensors[f"{name}.weight"])


def test_an_embedding_of_another_size_is_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 96', '"vocab_size": 95'))
    checkpoint = Checkpoint(tmp_path)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    with pytest.raises(BadInput, match=r"embed_tokens\.weight has shape \[96, 32\].*\[95, 32\]"):
        stream.prepare(token_ids())


def test_bfloat16_gemms_change_little_and_keep_float_weights(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        stream = LayerStream(checkpoint, architecture_of(checkpoint), dtype)
        stream.prepare(token_ids())
        states = stream.embed(token_ids())
        stream.load(0, stream.tensors(0))
        grams = {name: record.gram for name, record in stream.measure(0, states).items()}
        found[dtype] = grams | {"": outputs(stream, 0, states)}
    exact, rounded = found[torch.float32], found[torch.bfloat16]
    for name, tensor in exact.items():
        assert rounded[name].dtype == torch.float32
        assert float((rounded[name] - tensor).norm()) < 0.02 * float(tensor.norm())
    assert not torch.equal(rounded[""], exact[""])


def test_the_dtype_of_the_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_dtype("float32", torch.bfloat16) == torch.float32
    assert compute_dtype("bfloat16", torch.float32) == torch.bfloat16
    for quick in (True, False):
        monkeypatch.setattr(layer_stream, "multiplies_bf16", lambda quick=quick: quick)
        chosen = torch.bfloat16 if quick else torch.float32
        assert compute_dtype("auto", torch.bfloat16) == chosen
        assert compute_dtype("auto", torch.float32) == torch.float32
    with pytest.raises(BadInput, match="--compute 'fp8'"):
        compute_dtype("fp8", torch.bfloat16)


def test_gemms_of_bfloat16_inputs_are_summed_exactly() -> None:
    inputs = torch.randn(300, 700).to(torch.bfloat16)
    rounded, exact = InputStatistics(700), InputStatistics(700)
    rounded.add(inputs)
    exact.add(inputs.to(torch.float32))
    torch.testing.assert_close(rounded.gram, exact.gram, rtol=1e-5, atol=1e-3)
    assert torch.equal(rounded.gram, rounded.gram.T)
    assert torch.equal(rounded.abs_max, exact.abs_max)
