"""Pinned versions of a distribution's requirements, as this environment has them: a constraints file."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def pinned_requirements(name: str) -> list[str]:
    """`name==version` of everything that a distribution requires, extras left out, sorted.

    Of a build such as 2.13.0+cpu the release alone is pinned: a constraint without a build fits each. What is
    not installed here, such as the CUDA libraries of another build, is not pinned.
    """
    versions: dict[str, str] = {}
    _collect(name, (), versions)
    versions.pop(canonicalize_name(name), None)
    return [f"{each}=={version}" for each, version in sorted(versions.items())]


def _collect(name: str, extras: tuple[str, ...], versions: dict[str, str]) -> None:
    try:
        held = distribution(name)
    except PackageNotFoundError:
        return
    key = canonicalize_name(name)
    if key in versions and not extras:
        return
    versions[key] = Version(held.version).public
    for line in held.requires or ():
        requirement = Requirement(line)
        if _applies(requirement, extras) and canonicalize_name(requirement.name) not in versions:
            _collect(requirement.name, tuple(requirement.extras), versions)


def _applies(requirement: Requirement, extras: tuple[str, ...]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
