from __future__ import annotations

from llmopt.quant.families import registry


def test_the_lines_of_the_registry_are_what_the_files_hold() -> None:
    for module, names in registry.FILES.items():
        families = [registry.model_family(name) for name in names]
        held = [
            name
            for family in registry._families_of(module)
            for name in (family.name, *family.other_names)
        ]
        assert sorted(held) == sorted(names), module
        assert all(family is not None for family in families)


def test_no_model_type_is_in_two_files() -> None:
    names = [name for names in registry.FILES.values() for name in names]
    assert len(names) == len(set(names))
