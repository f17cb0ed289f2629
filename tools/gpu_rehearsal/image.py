"""A Python environment as GPU machines bring it: the CUDA build of torch, on a CPU with stubs for CUDA.

The wheel is installed without the gigabytes of CUDA libraries that it requires. Stubs export the symbols that
torch's libraries need at their start, so that the Python API is the one of that build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    *("tokenizers", "numpy", "safetensors", "huggingface_hub", "typer<0.25", "rich"),
    *("pandas", "pyyaml", "jinja2", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
    *("matplotlib", "scipy", "psutil", "packaging", "sympy", "networkx", "filelock", "fsspec"),
    "setuptools",
)
"""Packages of such a machine: no pyarrow, pydantic (which typer 0.29 brings), fastapi, uvicorn, gguf,
llguidance, datasets, and no llmopt."""
LIBRARIES = ("flashinfer-python==0.7.2.post1", "fla-core==0.6.0")
"""Libraries whose Python side runs up to the launch; with what they need of the rest."""
NEEDS = ("apache-tvm-ffi", "einops", "nvidia-ml-py", "tabulate", "requests", "tqdm", "click")
SYSTEM = re.compile(r"^(lib(c|m|z|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux)")
VERSIONED = re.compile(r"File: (\S+)|Name: (\S+)")
"""Lines of `readelf -V`: a library, then the versions of the symbols that are taken from it."""
DRIVER_TOO_OLD = 35
"""cudaErrorInsufficientDriver: the answer of every stub, by which torch finds no usable card."""


@dataclass(frozen=True, slots=True)
class Build:
    """A release of torch with the releases that stand next to it, and the Python of its machines."""

    torch: str
    triton: str
    transformers: str
    python: str = ""
    has_libraries: bool = False


BUILDS = (
    Build("2.11.0", "3.6.0", "5.17.0", "3.12"),
    Build("2.13.0", "3.7.1", "5.23.0", has_libraries=True),
    Build("2.15.0", "3.9.0", "5.24.0"),
)


@dataclass(frozen=True, slots=True)
class Image:
    """Environment of a build in a folder."""

    folder: Path
    build: Build

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def environment(self, links: Path) -> Mapping[str, str]:
        """Variables under which the sources in `links` run there, offline and uninstalled."""
        return os.environ | {
            "LD_LIBRARY_PATH": str(self.folder / "stubs"),
            "PYTHONPATH": str(links),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def make(self) -> None:
        """Install the packages and build the stubs, unless a run before did."""
        done = self.folder / "made"
        if done.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        python = shutil.which(f"python{self.build.python}")
        if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
            python = (
                sys.executable
            )  # that release is not there, or pyenv's shim has none of it active
        subprocess.run([python, "-m", "venv", self.folder / "venv"], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet"]
        torch = [f"torch=={self.build.torch}", f"triton=={self.build.triton}"]
        # Without pip's settings, under which it may take a CPU build that lies near.
        plain = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
        plain["PIP_CONFIG_FILE"] = os.devnull
        # accelerate requires torch, which requires the libraries that the stubs replace.
        libraries, needs = (LIBRARIES, NEEDS) if self.build.has_libraries else ((), ())
        cuda = [*pip, "--no-deps", *torch, "accelerate", "nvidia-cuda-runtime>=13,<14", *libraries]
        subprocess.run(cuda, check=True, env=plain)
        others = [f"transformers=={self.build.transformers}", *PACKAGES, *needs]
        subprocess.run([*pip, *others], check=True, env=plain)
        stubs = self.folder / "stubs"
        stubs.mkdir()
        (site,) = (self.folder / "venv" / "lib").glob("python3*/site-packages")
        for runtime in site.rglob("libcudart.so.*"):
            shutil.copy(runtime, stubs)
        write_stubs(sorted((site / "torch" / "lib").glob("*.so*")), stubs)
        done.touch()


def write_stubs(libraries: Iterable[Path], folder: Path) -> None:
    """Compile a stub for each library that `libraries` need and neither they nor the folder contain."""
    known = {path.name for path in libraries} | {path.name for path in folder.iterdir()}
    missing: set[str] = set()
    defined: set[str] = set()
    undefined: set[str] = set()
    owners: dict[str, str] = {}
    for library in libraries:
        needed = re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-d", library))
        missing |= {name for name in needed if name not in known and not SYSTEM.match(name)}
        owner = ""
        for file, version in VERSIONED.findall(_output("readelf", "-V", library)):
            owner = file or owner
            if version:
                owners[version] = owner
        for line in _output("nm", "-D", library).splitlines():
            *_, kind, symbol = line.split()
            (undefined if kind == "U" else defined).add(symbol)
    exported = {symbol.partition("@")[0] for symbol in defined}
    stubs: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in sorted(missing)}
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        if (owner := owners.get(version)) in stubs:
            stubs[owner][version].add(name)
        # The loader searches all libraries for a symbol without a version, so any stub may export it.
        elif not version and name not in exported and not name.startswith(("Py", "_Py", "_Z")):
            stubs[min(stubs)][""].add(name)
    for name, symbols in stubs.items():
        _compile(folder, name, symbols)


def _compile(folder: Path, name: str, symbols: Mapping[str, set[str]]) -> None:
    """Compile the stub of one library, which exports `symbols` by their version; "" is none."""
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    functions = (
        f"int {symbol}(void) {{ return {DRIVER_TOO_OLD}; }}"
        for symbol in sorted(set().union(*symbols.values()))
    )
    source.write_text("\n".join(functions) + "\nint llmopt_stub;\n")
    compiler = ["cc", "-shared", "-fPIC", "-w", "-o", folder / name, source, f"-Wl,-soname,{name}"]
    versions = {version: names for version, names in symbols.items() if version}
    if versions:
        lines = (f"{v} {{ global: {'; '.join(sorted(names))}; }};" for v, names in versions.items())
        script.write_text("\n".join(lines))
        compiler.append(f"-Wl,--version-script={script}")
    subprocess.run(compiler, check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
