"""Train Medusa heads and an EAGLE head for a small model, distilled from the model's own output.

    python tools/train_heads.py --model stories3M --output heads

writes `heads/medusa` and `heads/eagle` as their authors publish them: a config.json, and the weights. The
model goes on from beginnings of the calibration text; the heads learn its own distributions over that. A few
minutes on one core for the bundled model, and the same weights every time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.quant.models import resolve_model
from llmopt.recipes import DATA
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

PROMPT_TOKENS = 24
LENGTH = 192
BATCH = 4
RATE = 1e-3


class Medusa(nn.Module):
    """Heads of one residual block each; head k scores the token k + 2 positions ahead."""

    def __init__(self, hidden: int, vocab: int, count: int, output: torch.Tensor) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        self.outputs: Any = nn.ModuleList(
            nn.Linear(hidden, vocab, bias=False) for _ in range(count)
        )
        for block, top in zip(self.blocks, self.outputs, strict=True):
            nn.init.zeros_(block.weight)  # begin as the model's own projection
            nn.init.zeros_(block.bias)
            top.weight.data.copy_(output)

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.blocks, self.outputs, strict=True)
        return [top(hidden + functional.silu(block(hidden))) for block, top in pairs]

    def published(self) -> dict[str, torch.Tensor]:
        found = {}
        for head, (block, top) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            found[f"{head}.0.linear.weight"] = block.weight
            found[f"{head}.0.linear.bias"] = block.bias
            found[f"{head}.1.weight"] = top.weight
        return found


class Eagle(nn.Module):
    """A layer without a norm before its attention, over token embeddings concatenated with hidden states."""

    def __init__(self, config: Any, embedding: torch.Tensor) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer: Any = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        hidden = self.fc(torch.cat([self.embedding(tokens), before], dim=-1))
        return self.layer(
            hidden, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
        )

    def published(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {
            "embed_tokens.weight": self.embedding.weight,
            "fc.weight": self.fc.weight,
            **layer,
        }


def main() -> None:
    given = _arguments()
    torch.manual_seed(given.seed)
    torch.set_num_threads(given.threads)
    folder = resolve_model(given.model)
    began = time.perf_counter()
    tokens = _own_words(given)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    hidden = torch.cat([_hidden(model, part) for part in tokens.split(64)])
    output = model.lm_head.weight.data
    print(f"{tokens.numel()} tokens, {time.perf_counter() - began:.0f} s", flush=True)

    medusa = Medusa(output.shape[1], output.shape[0], given.heads, output)
    _train(medusa, given.epochs, tokens, hidden, lambda *b: _medusa_loss(medusa, output, *b))
    names = {"medusa_num_heads": given.heads, "medusa_num_layers": 1}
    config = {**names, "base_model_name_or_path": given.model, "version": "2"}
    _save(given.output / "medusa", "medusa_lm_head.safetensors", config, medusa.published())

    eagle = Eagle(model.config, model.get_input_embeddings().weight.data)
    _train(eagle, given.epochs, tokens, hidden, lambda *b: _eagle_loss(eagle, output, *b))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "dtype": "float32"}
    _save(given.output / "eagle", "model.safetensors", config, eagle.published())
    print(f"done after {time.perf_counter() - began:.0f} s")


def _own_words(given: argparse.Namespace) -> torch.Tensor:
    """Beginnings of the text with the model's completions, int64 [sequences, LENGTH]."""
    llm = LLM(given.model, dtype="float32", num_threads=given.threads, max_num_seqs=64)
    stories = (DATA / "calibration.txt").read_text(encoding="utf-8").split("\n\n")
    encoded = [llm.engine.encode(story)[:PROMPT_TOKENS] for story in stories]
    prompts = [one for one in encoded if len(one) == PROMPT_TOKENS][: given.sequences]
    found = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(
            temperature=temperature,
            seed=given.seed,
            max_tokens=LENGTH - PROMPT_TOKENS,
            ignore_eos=True,
        )
        results = llm.generate(prompts, params)
        found += [[*p, *r.token_ids] for p, r in zip(prompts, results, strict=True)]
    return torch.tensor(found)


@torch.no_grad()
def _hidden(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Final hidden states, the input of the LM head, at each token."""
    return model.model(tokens).last_hidden_state


def _train(
    module: nn.Module, epochs: int, tokens: torch.Tensor, hidden: torch.Tensor, loss: Any
) -> None:
    steps = epochs * -(-len(tokens) // BATCH)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    for epoch in range(epochs):
        total = 0.0
        for part in torch.randperm(len(tokens)).split(BATCH):
            value = loss(tokens[part], hidden[part])
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += value.item() * len(part)
        print(f"{type(module).__name__} epoch {epoch + 1}: {total / len(tokens):.4f}", flush=True)


def _cross_entropy(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Against the model's own distribution, of scores [..., vocab]."""
    return -(wanted.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean()


def _medusa_loss(
    medusa: Medusa, output: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    wanted = hidden @ output.T  # behind token t stands the distribution of token t + 1
    losses = [
        _cross_entropy(scores[:, : -(ahead + 1)], wanted[:, ahead + 1 :]) * 0.8**ahead
        for ahead, scores in enumerate(medusa(hidden))
    ]
    return torch.stack(losses).sum()


def _eagle_loss(
    eagle: Eagle, output: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Regression of hidden states plus cross-entropy of logits; again from the head's own output."""
    wanted, total = hidden[:, 1:], torch.zeros(())
    before = hidden[:, :-1]
    for _ in range(2):
        found = eagle(tokens[:, 1:], before)
        total = total + functional.smooth_l1_loss(found, wanted)
        total = total + 0.1 * _cross_entropy(found @ output.T, wanted @ output.T)
        before = torch.cat([hidden[:, :1], found[:, :-1]], dim=1)
    return total


def _save(
    folder: Path, file: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="stories3M", help="a Llama, a folder or a bundled name")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--heads", type=int, default=4, help="Medusa heads")
    parser.add_argument("--sequences", type=int, default=256, help="beginnings to go on from")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
