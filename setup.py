"""The folders of the tree, under their installed names: `engine/` installs as `llmopt.engine`."""

from setuptools import find_packages, setup

FLOORS = ("bench", "cli", "engine", "quant", "recipes")

folders = find_packages(include=[pattern for floor in FLOORS for pattern in (floor, f"{floor}.*")])
setup(
    packages=[f"llmopt.{folder}" for folder in folders],
    package_dir={f"llmopt.{floor}": floor for floor in FLOORS},
)
