"""What the methods make of options, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.option import options_of
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS

CHOICES: list[tuple[str, dict[str, Any], Scheme]] = [
    ("rtn", {}, IntScheme(4, 128, True)),
    *(("rtn", {"bits": bits}, IntScheme(bits, 128, True)) for bits in (2, 3, 5, 6, 8)),
    ("int8", {}, IntScheme(8, -1, True)),
    ("int8", {"group_size": 64, "symmetric": True}, IntScheme(8, 64, True)),
    ("int8", {"outlier_threshold": 6.0}, VectorwiseScheme(6.0)),
    ("fp8", {}, FloatScheme("channel", Activations("fp8"))),
    ("fp8", {"granularity": "tensor", "activations": "none"}, FloatScheme("tensor")),
    (
        "fp8",
        {"granularity": "tensor", "activations": "static"},
        FloatScheme("tensor", Activations("fp8", "tensor", dynamic=False)),
    ),
    ("fp8", {"granularity": "block"}, FloatScheme("block", Activations("fp8", "group128"))),
    ("nf4", {}, CodebookScheme("nf4")),
    ("fp4", {"double_quant": True}, CodebookScheme("fp4", double_quant=True)),
    ("nf4", {"group_size": 128}, CodebookScheme("nf4", 128)),
    ("nvfp4", {}, Fp4Scheme("nvfp4")),
    (
        "nvfp4",
        {"bits": 4, "group_size": 16, "activations": "static"},
        Fp4Scheme("nvfp4", Activations("nvfp4", "group16", dynamic=False)),
    ),
    (
        "mxfp4",
        {"activations": "dynamic"},
        Fp4Scheme("mxfp4", Activations("mxfp4", "group32")),
    ),
    ("smoothquant", {"bits": 8}, IntScheme(8, -1, True, Activations("int8"))),
    ("hqq", {}, IntScheme(4, 64, False)),
    ("hqq", {"bits": 2, "group_size": 32, "symmetric": True}, IntScheme(2, 32, True)),
    ("awq", {"bits": 3, "group_size": 64, "symmetric": True}, IntScheme(3, 64, True)),
    ("gptq", {"act_order": "dynamic"}, IntScheme(4, 128, True, permuted=True)),
    ("squeezellm", {}, LookupScheme(4, 0.0045)),
    ("squeezellm", {"bits": 3, "sparse_fraction": 0.0}, LookupScheme(3)),
]


@pytest.mark.parametrize(("method", "options", "scheme"), CHOICES, ids=str)
def test_schemes_of_methods(method: str, options: dict[str, Any], scheme: Scheme) -> None:
    assert METHODS[method].scheme(SchemeOptions(**options)) == scheme


def test_the_help_names_the_methods_with_zero_points_by_default() -> None:
    with_zeros = [
        name
        for name, method in METHODS.items()
        if "symmetric" in method.takes and method.scheme(SchemeOptions()).asymmetric
    ]
    assert (
        f"Default: with for {' and '.join(with_zeros)},"
        in options_of(SchemeOptions)["symmetric"].help
    )


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("rtn", {"bits": 7}, "--bits 7"),
    ("rtn", {"granularity": "block"}, "--granularity block"),
    ("int8", {"bits": 4}, "--bits 4"),
    ("int8", {"symmetric": False}, "--asymmetric"),
    ("int8", {"outlier_threshold": 0.0}, "--outlier-threshold 0"),
    ("int8", {"outlier_threshold": 6.0, "group_size": 64}, "--group-size 64"),
    ("int8", {"granularity": "block"}, "--granularity block"),
    ("fp8", {"bits": 4}, "--bits 4"),
    ("fp8", {"granularity": "row"}, "--granularity row"),
    ("fp8", {"activations": "token"}, "--activations token"),
    ("fp8", {"activations": "static", "granularity": "block"}, "--activations static"),
    ("fp8", {"double_quant": True}, "--double-quant: method"),
    ("nf4", {"bits": 8}, "--bits 8"),
    ("nf4", {"group_size": 48}, "--group-size 48"),
    ("fp4", {"symmetric": False}, "--asymmetric"),
    ("nvfp4", {"bits": 8}, "--bits 8"),
    ("nvfp4", {"group_size": 32}, "--group-size 32: blocks of method nvfp4 have 16"),
    (
        "nvfp4",
        {"activations": "dynamic"},
        "--activations dynamic: method nvfp4 has static and none",
    ),
    ("mxfp4", {"activations": "static"}, "--activations static"),
    ("mxfp4", {"symmetric": False}, "--asymmetric"),
    ("smoothquant", {"bits": 4}, "--bits 4"),
    ("smoothquant", {"group_size": 128}, "--group-size 128"),
    ("smoothquant", {"activations": "static"}, "--activations static"),
    ("hqq", {"bits": 5}, "--bits 5"),
    ("hqq", {"sparse_fraction": 0.01}, "--sparse 0.01"),
    ("awq", {"granularity": "block"}, "--granularity block"),
    ("awq", {"activations": "dynamic"}, "--activations dynamic"),
    ("awq", {"act_order": "dynamic"}, "--act-order dynamic"),
    ("gptq", {"double_quant": True}, "--double-quant: method"),
    ("gptq", {"outlier_threshold": 6.0}, "--outlier-threshold 6"),
    ("gptq", {"sparse_fraction": 0.01}, "--sparse 0.01"),
    ("rtn", {"act_order": "none"}, "--act-order none"),
    ("squeezellm", {"bits": 6}, "--bits 6"),
    ("squeezellm", {"group_size": 64}, "--group-size 64"),
    ("squeezellm", {"sparse_fraction": 0.7}, "sparse fraction of 0.7"),
]


@pytest.mark.parametrize(("method", "options", "message"), REFUSALS, ids=str)
def test_options_that_a_method_has_not_are_named(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        METHODS[method].scheme(SchemeOptions(**options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_every_method_has_a_format_that_holds_its_own_scheme(method: Any) -> None:
    """Its default format, or compressed-tensors where that one does not fit."""
    scheme = method.scheme(SchemeOptions())
    try:
        FORMATS[method.default_format].check_scheme(scheme)
    except BadInput:
        FORMATS["compressed-tensors"].check_scheme(scheme)
