"""kernels.cpp, called by ctypes: the functions between the products of a layer, and attention."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_cli.machine import built

SOURCE = Path(__file__).with_name("kernels.cpp")
POINTER, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernels:
    """The functions of kernels.cpp over bfloat16 tensors on the CPU, contiguous unless said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = _declared(
            library.attend, [*[POINTER] * 4, *[NUMBER] * 3, POINTER, *[NUMBER] * 4, REAL, *[NUMBER] * 2]
        )
        self._add_norm = _declared(library.add_norm, [*[POINTER] * 4, *[NUMBER] * 2, REAL])
        self._gate = _declared(library.gate, [*[POINTER] * 2, *[NUMBER] * 2])
        self._rotate = _declared(library.rotate, [*[POINTER] * 8, *[NUMBER] * 4, REAL])

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden [C, d] += delta, in place; returns its RMS norm."""
        out = torch.empty_like(hidden)
        self._add_norm(*_addresses(hidden, delta, weight, out), *hidden.shape, eps)
        return out

    def gate(self, joined: Tensor) -> Tensor:
        """silu(gate) * up, [C, m], for gate and up side by side, [C, 2m]."""
        out = joined.new_empty(len(joined), joined.shape[1] // 2)
        self._gate(*_addresses(joined, out), *out.shape)
        return out

    def rotate(
        self, joined: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor | None, Tensor | None], eps: float,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """joined [C, all heads * size] → query [C, heads, size], key, value [C, KV heads, size]; cos, sin [C, size / 2]."""
        query, key, _ = out
        addresses = _addresses(joined, cos, sin, *norms, *out)
        self._rotate(*addresses, len(joined), query.shape[1], key.shape[1], query.shape[2], eps)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: npt.NDArray[np.int64],
        scale: float,
        window: int,
        last: bool,
    ) -> Tensor:
        """Attention of query [R, heads, size] to key, value [R, KV heads, size]; sequences [n, 5] as in kernels.cpp."""
        out = torch.zeros_like(query)
        self._attend(
            *_addresses(query, key, value, out), *(x.stride(0) for x in (query, key, value)),
            sequences.ctypes.data, len(sequences), query.shape[1], *key.shape[1:], scale, window, last,
        )  # fmt: skip
        return out


def _declared(function: Any, arguments: list[Any]) -> Callable[..., None]:
    function.restype, function.argtypes = None, arguments
    declared: Callable[..., None] = function
    return declared


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def load_kernels() -> Kernels | None:
    """Those of this machine, or None where it has no use for them or no compiler."""
    library = built(SOURCE) if torch.cpu._is_amx_tile_supported() else None
    return Kernels(library) if library else None
