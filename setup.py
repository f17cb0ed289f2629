"""The folders of the tree by their installed names: `package/` is `llmopt`, `engine/` is `llmopt.engine`."""

from setuptools import find_packages, setup

FLOORS = ("base", "bench", "cli", "engine", "quant", "recipes")

folders = find_packages(include=[pattern for floor in FLOORS for pattern in (floor, f"{floor}.*")])
setup(
    packages=["llmopt", *(f"llmopt.{folder}" for folder in folders)],
    package_dir={"llmopt": "package", **{f"llmopt.{floor}": floor for floor in FLOORS}},
)
