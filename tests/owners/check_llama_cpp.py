"""GGUF files of this package in llama.cpp: the same tokens, the same logits, the same greedy text.

    LLAMA_CPP_PYTHON=<python with llama-cpp-python> python tests/owners/check_llama_cpp.py [--tokenizers DIR]

llama.cpp lives in an environment of its own; this script writes the files, sends paths and token ids to it,
and compares. llama.cpp quantizes activations to 8 bits before each GEMM, so its logits are near ours, not
equal: the distance is given as KL divergence. Its cache is in float32. It quantizes no activations with float weights, so each kind of
file is also given to it with its blocks dequantized by the `gguf` package ("as F32"); these must agree with
our reading of the blocks. `--tokenizers` names a folder of folders with `tokenizer.json`, whose texts are compared too.
Exit code 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROMPT = "Once upon a time, there was a little girl named Lily."
TEXTS = (
    PROMPT,
    "  Two spaces, a tab\tand\n\nlines \n  with  3 numbers: 1 22 333 4444 55555.",
    "It's what we'll say: DON'T! (really?) -- [x] {y} <z> @#$%^&*",
    "naïve café, Größe, Привет мир, 你好世界, こんにちは, 😀👍🏽",
)
MAX_KL = 5e-3
MAX_KL_OF_FLOATS = 1e-6  # ggml's GELU is a table of float16; the others are at 1e-12
NEW_TOKENS = 48

CHILD = """
import json, sys
import numpy as np
import llama_cpp
from llama_cpp import Llama

# Repacked weights need AMX, which not every machine that names it allows.
defaults = llama_cpp.llama_cpp.llama_model_default_params

def without_repacking():
    params = defaults()
    params.use_extra_bufts = False
    return params

llama_cpp.llama_cpp.llama_model_default_params = without_repacking

task = json.load(sys.stdin)
result = []
for item in task:
    vocab_only = item.get("vocab_only", False)
    model = Llama(item["path"], n_ctx=256, logits_all=not vocab_only, verbose=True, n_threads=2,
                  vocab_only=vocab_only, flash_attn=False, type_k=0, type_v=0)
    answer = {"tokens": [model.tokenize(t.encode(), add_bos=True, special=False) for t in item["texts"]]}
    if not vocab_only:
        ids = item["ids"]
        model.reset()
        model.eval(ids)
        answer["logits"] = np.asarray(model.scores[: len(ids)]).tolist()
        greedy = []
        while len(greedy) < item["new_tokens"]:
            greedy.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(greedy[-1:])
        answer["greedy"] = greedy
    result.append(answer)
    model.close()
json.dump(result, sys.stdout)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizers", type=Path, help="folder of tokenizer folders to compare")
    parser.add_argument("--only", default="", help="only files whose model and type contain this")
    parser.add_argument("--output", type=Path, help="JSON file for the rows of the table")
    arguments = parser.parse_args()
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if not python:
        parser.error("set LLAMA_CPP_PYTHON to a python that has llama-cpp-python")
    with tempfile.TemporaryDirectory() as folder:
        rows = compare_models(python, Path(folder) / "models", arguments.only)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        broken = sum(row["broken"] for row in rows)
        if not arguments.only:
            broken += compare_tokenizers(python, Path(folder) / "tokenizers", arguments.tokenizers)
    print(f"{broken} broken" if broken else "all within limits")
    return 1 if broken else 0


def compare_models(python: str, folder: Path, only: str) -> list[dict[str, Any]]:
    """Every type, and every architecture; a row of figures for each file."""
    from llmopt.quant.gguf.mix import GGUF_TYPES

    from tests.support.gguf_support import RANDOM_MODELS, STORIES, random_model, write_model

    sources = {(STORIES, kind) for kind in ("Q8_0", "Q4_K_M")}
    wide = random_model(folder / "source" / "wide", "llama")  # rows of 256, which every type fits
    sources |= {(wide, kind) for kind in GGUF_TYPES}
    for name in RANDOM_MODELS:
        source = random_model(folder / "source" / name, name)
        sources |= {(source, kind) for kind in ("Q8_0", "Q4_K_M")}
    files = []
    for source, kind in sorted(sources):
        if only in f"{source.name} {kind}":
            files.append(write_model(source, folder / source.name / kind, kind))
            # transformers reads the tokenizers of some architectures alone from the file itself.
            for file in (*source.glob("*token*"), source / "config.json"):
                shutil.copy(file, files[-1].parent)
    ours = [our_answer(path) for path in files]
    tasks = []
    for path, answer in zip(files, ours, strict=True):
        task = {"texts": [PROMPT], "ids": answer["ids"], "new_tokens": NEW_TOKENS}
        tasks += [{**task, "path": str(path)}, {**task, "path": str(as_floats(path))}]
    answers = ask(python, tasks)
    rows: list[dict[str, Any]] = []
    print(
        f"{'file':32} {'KL':>9} {'max |Δ logit|':>13} {'same top-1':>10} {'greedy equal':>12}  tokens"
    )
    for index, (path, mine) in enumerate(zip(files, ours, strict=True)):
        floats = f"{path.stem} as F32"
        rows.append(print_row(path.stem, mine, answers[2 * index], MAX_KL))
        rows.append(print_row(floats, mine, answers[2 * index + 1], MAX_KL_OF_FLOATS))
    return rows


def as_floats(path: Path) -> Path:
    """The same model with every tensor in float32, dequantized by the owner of the format."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf

    def tensor(stored: Any) -> TensorToWrite:
        values = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        return TensorToWrite(stored.name, values.shape, "F32", lambda: [values.tobytes()])

    target = path.with_name(f"{path.stem}-as-F32.gguf")
    metadata = GgufFile(path).metadata | {"general.file_type": 0}
    write_gguf(target, metadata, [tensor(stored) for stored in GGUFReader(path).tensors])
    return target


def our_answer(path: Path) -> dict[str, Any]:
    """Token ids of the prompt, logits after each, and a greedy continuation from this engine."""
    from llmopt.engine import LLM, SamplingParams
    from llmopt.engine.config.config import EngineConfig
    from llmopt.engine.core.engine import Engine

    options: Any = {"dtype": "float32", "device": "cpu", "cpu_activations": 16}
    engine = Engine(EngineConfig(model=path, **options))
    ids = list(engine.tokenizer(PROMPT).input_ids)
    generated = LLM(path, **options).generate(
        [ids], SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    )
    return {
        "ids": ids,
        "logits": engine.prompt_logits(ids),
        "greedy": list(generated[0].token_ids),
    }


def print_row(
    name: str, mine: dict[str, Any], theirs: dict[str, Any], max_kl: float
) -> dict[str, Any]:
    """One line of the table, which is printed; `broken` where a limit is."""
    import torch

    if "refused" in theirs:
        print(f"{name:32} llama.cpp: {theirs['refused']}", flush=True)
        return {"file": name, "refused": theirs["refused"], "broken": True}
    own, other = mine["logits"].double(), torch.tensor(theirs["logits"], dtype=torch.float64)
    log_own, log_other = own.log_softmax(-1), other.log_softmax(-1)
    divergence = float((log_own.exp() * (log_own - log_other)).sum(-1).mean())
    top = float((own.argmax(-1) == other.argmax(-1)).float().mean())
    pairs = zip(mine["greedy"], theirs["greedy"], strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), NEW_TOKENS)
    same_tokens = theirs["tokens"][0] == mine["ids"]
    largest = float((own - other).abs().max())
    print(
        f"{name:32} {divergence:9.2e} {largest:13.4f} {top:10.1%} "
        f"{f'{equal}/{NEW_TOKENS}':>12}  {'equal' if same_tokens else 'DIFFERENT'}"
    )
    return {
        "file": name,
        "kl_nats": divergence,
        "limit": max_kl,
        "max_logit_difference": largest,
        "same_top1": top,
        "greedy_equal": equal,
        "same_tokens": same_tokens,
        "broken": divergence > max_kl or not same_tokens,
    }


def compare_tokenizers(python: str, folder: Path, given: Path | None) -> int:
    """Token ids of several texts for every kind of tokenizer; how many differ."""
    from llmopt.quant.gguf.container import write_gguf
    from llmopt.quant.gguf.tokenizer import tokenizer_keys
    from tokenizers import Tokenizer

    from tests.support.gguf_support import SPLITS, STORIES, byte_level_tokenizer

    sources = {"stories3M": STORIES}
    for split in (None, *SPLITS):
        name = f"trained-{split or 'gpt-2'}"
        byte_level_tokenizer(folder / name, split)
        sources[name] = folder / name
    if given is not None:
        sources |= {p.parent.name: p.parent for p in sorted(given.glob("*/tokenizer.json"))}
    tasks, expected = [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        # What the file itself says: transformers rebuilds some kinds, with other leading spaces.
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        expected[name] = [tokenizer.encode(text).ids for text in TEXTS]
        size = tokenizer.get_vocab_size()
        keys = {
            "general.architecture": "llama",
            "llama.vocab_size": size,
            **tokenizer_keys(source, size),
        }
        path = folder / f"{name}.gguf"
        write_gguf(path, keys, [])
        tasks.append({"path": str(path), "texts": TEXTS, "vocab_only": True})
    broken = 0
    for (name, ids), theirs in zip(expected.items(), ask(python, tasks), strict=True):
        same = [mine == other for mine, other in zip(ids, theirs["tokens"], strict=True)]
        broken += same.count(False)
        print(f"tokenizer {name:20} {same.count(True)} of {len(same)} texts equal")
    return broken


def ask(python: str, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """llama.cpp's results; the last line of its stderr for a file on which it fails."""
    done = subprocess.run(
        [shutil.which(python) or python, "-c", CHILD],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and len(tasks) > 1:  # one file ended the process: which?
        return [answer for task in tasks for answer in ask(python, [task])]
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing said"]
        return [{"refused": f"exit code {done.returncode}: {lines[-1][:200]}"}]
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
