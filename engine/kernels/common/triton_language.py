"""Additions to Triton: programmatic dependent launch, and fixes for interpreter bugs: five that 3.9 still
has, and one of 3.6 in ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import interpreter


@triton.jit
def await_predecessor(PDL: tl.constexpr):
    """Wait for the kernel before, and start the next (PTX `griddepcontrol`): a kernel's first statement."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def patch_interpreter() -> bool:
    """Patch ranges, conditions, `tl.dot`, bfloat16's subtraction and casts; False without interpreter."""
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        return False
    patch: Any = interpreter._patch_lang_tensor
    builder: Any = interpreter.InterpreterBuilder
    dot, cast, to_float = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp
    subtract, splat = builder.create_fsub, builder.create_splat

    def patch_tensor(tensor: Any, scope: Any) -> None:
        # NumPy 2.4 no longer converts one-element arrays to int; Triton 3.6's scalars are such arrays.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def create_fsub(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return subtract(self, a, b)
        difference = _widened(a).data - _widened(b).data
        return interpreter.TensorHandle(_rounded(difference), tl.bfloat16)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(self, source, to)

    def create_fp_to_fp(self: Any, source: Any, to: Any, mode: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar in _FLOAT8:
            # Rounded to nearest, as torch does; the interpreter drops the carry.
            nearest = torch.from_numpy(np.array(source.data)).to(_FLOAT8[to.scalar])
            return interpreter.TensorHandle(nearest.view(torch.uint8).numpy(), to.scalar)
        return to_float(self, source, to, mode)

    def create_splat(self: Any, block: Any, scalar: Any) -> Any:
        # A condition has the type of what was compared, so it became an integer, which Triton 3.9 refuses as
        # a mask.
        result = splat(self, block, scalar)
        if scalar.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data.astype(np.bool_), tl.int1)
        return result

    interpreter._patch_lang_tensor = patch_tensor
    builder.create_splat = create_splat
    builder.create_fp_to_fp = create_fp_to_fp
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    builder.create_fsub = create_fsub
    return True


def _widened(operand: Any) -> Any:
    """bfloat16 operands as float32: the interpreter stores their bits, and would multiply those."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _rounded(data: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; the interpreter would truncate."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)


_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
