"""Our reading of a GGUF file's tokenizer beside llama.cpp's: the same ids, for every pre-tokenizer it knows.

    LLAMA_CPP_PYTHON=<python with llama-cpp-python> python tests/owners/check_gguf_tokenizers.py \
        --byte-level FOLDER --sentencepiece FOLDER [--text FILE...]

The folders hold a `tokenizer.json`: a byte-level vocabulary is written once under each name of
`quant/gguf/tokenizer.py`, a SentencePiece one as it is and as raw-text BPE. Where llama.cpp approximates
a model's own expression, lines may differ; each such name is printed with its first one. Exit code 1 where
more than one line in a hundred differs, unless `APPROXIMATED` says why, or llama.cpp refuses a file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HOSTILE = (
    "  Two spaces, a tab\tand\n\nlines \n  with  3 numbers: 1 22 333 4444 55555 666666.",
    "It's what we'll say: DON'T! (really?) -- [x] {y} <z> @#$%^&* ½ ²",
    "naïve café, Größe, Привет мир, 你好世界, こんにちは, 안녕하세요, สวัสดี, 😀👍🏽",
    "def f(x):\n    return {'a': x**2}  # ok\r\n\r\n\t\tend   ",
    "HTTPServer getURLById camelCase snake_case ÀÉÎ ЁЖ Ωμέγα",
    "\n\n\n\nnewlines\n \n  \n   then     spaces",
)
MAX_SHARE = 0.01
APPROXIMATED = {
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        r"tokenizer.json has \d{1,3}(?=(?:\d{3})*\b), llama.cpp also groups digits before a letter",
    ),
    **dict.fromkeys(
        ("kimi-k2", "youtu"),
        "tokenizer.json cuts before a capital behind a small letter, llama.cpp does not",
    ),
}
"""Names whose model's own expression llama.cpp's comments quote and its code approximates (src/unicode.cpp)."""


def main() -> int:
    """Compare each vocabulary under each name; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--byte-level", type=Path, required=True)
    parser.add_argument("--sentencepiece", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="a line is a text")
    options = parser.parse_args()
    lines = (line for path in options.text for line in path.read_text("utf-8").splitlines(True))
    texts = [*HOSTILE, *(line for line in lines if line.strip())]
    broken = 0
    with tempfile.TemporaryDirectory() as scratch:
        for path in vocabularies(Path(scratch), options.byte_level, options.sentencepiece):
            broken += compare(os.environ.get("LLAMA_CPP_PYTHON", "python"), path, texts)
            path.unlink()
    print(f"{broken} outside the limit")
    return 1 if broken else 0


def vocabularies(scratch: Path, byte_level: Path, sentencepiece: Path) -> Iterator[Path]:
    """Files that hold a tokenizer and nothing else, one for each kind and name."""
    from llmopt.quant.gguf.container import write_gguf
    from llmopt.quant.gguf.tokenizer import EXPRESSIONS, RAW_TEXT, tokenizer_keys
    from llmopt.quant.model.checkpoint import read_json
    from tokenizers import Tokenizer

    for name in ("sentencepiece", *EXPRESSIONS):
        source = sentencepiece if name == "sentencepiece" or name in RAW_TEXT else byte_level
        size = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
        keys = tokenizer_keys(source, size)
        if name in RAW_TEXT:
            merges = read_json(source / "tokenizer.json")["model"]["merges"]
            keys["tokenizer.ggml.merges"] = [
                merge if isinstance(merge, str) else " ".join(merge) for merge in merges
            ]
            keys["tokenizer.ggml.model"] = "gemma4" if name == "gemma4" else "gpt2"
        if name != "sentencepiece":
            keys["tokenizer.ggml.pre"] = name
        path = scratch / f"{name}.gguf"
        write_gguf(path, {"general.architecture": "llama", "llama.vocab_size": size, **keys}, [])
        yield path


def compare(python: str, path: Path, texts: Sequence[str]) -> int:
    """One line for one file; 1 where it is outside the limit."""
    from llmopt.quant.gguf.container import GgufFile
    from llmopt.quant.gguf.read_tokenizer import read_tokenizer

    from tests.owners.check_llama_cpp import ask

    task: dict[str, Any] = {"path": str(path), "texts": list(texts), "vocab_only": True}
    (theirs,) = ask(python, [task])
    if "refused" in theirs:
        print(f"{path.stem:24} llama.cpp: {theirs['refused']}", flush=True)
        return 1
    tokenizer = read_tokenizer(GgufFile(path))
    ours = tokenizer(list(texts)).input_ids
    differ = [text for text, a, b in zip(texts, ours, theirs["tokens"], strict=True) if a != b]
    first = f", first {differ[0][:60]!r}" if differ else ""
    why = f" ({APPROXIMATED[path.stem]})" if differ and path.stem in APPROXIMATED else ""
    print(f"{path.stem:24} {len(differ)} of {len(texts)} lines differ{first}{why}", flush=True)
    return int(len(differ) > MAX_SHARE * len(texts) and path.stem not in APPROXIMATED)


if __name__ == "__main__":
    sys.exit(main())
