"""Heads: small networks between vectors and scores, in safetensors.

`mlp` scores a pair: the first layer takes the user's vector followed by the item's, the last gives one number. `user_tower`
turns the user's vector into one of the items' width, before the dot product or cosine. Tensors are `layers.0.weight`
[out, in], `layers.0.bias` [out], `layers.1.weight` and so on, as torch.nn.Linear has them; the metadata say `head` and
`activation`, which stands between the layers and not behind the last.
"""

import copy
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from prefill_cli.errors import ItemsError, first_line, nearest

KINDS = ("mlp", "user_tower")
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}
STEEPEST = 1.2  # no activation changes faster than its argument times this (GELU: 1.13)
ROWS = 64  # of a product: always as many, so that a vector's bits do not depend on its neighbours


@dataclass(frozen=True)
class Head:
    """Layers (weight [out, in], bias [out]), float32."""

    kind: str
    activation: str
    layers: tuple[tuple[Tensor, Tensor], ...]
    sha256: str

    @property
    def inputs(self) -> int:
        return int(self.layers[0][0].shape[1])

    @property
    def outputs(self) -> int:
        return int(self.layers[-1][0].shape[0])

    def act(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)  # type: ignore[operator, no-any-return]

    def tower(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[n, outputs] for users' vectors [n, inputs]."""
        x = tensor(vectors)
        for number, (weight, bias) in enumerate(self.layers):
            x = linear(self.act(x) if number else x, weight, bias)
        out: npt.NDArray[np.float32] = x.numpy()
        return out


def tensor(array: npt.NDArray[np.float32]) -> Tensor:
    """The same memory, or a copy where it is read-only, as a memory-mapped file is: torch does not take that."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int = ROWS) -> Tensor:
    """[n, out] = x [n, in] weight.T + bias by products of exactly `rows` rows: one kernel, one order of sums."""
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    parts = [F.linear(part, weight, bias) for part in torch.split(padded, rows)]
    return torch.cat(parts)[: len(x)] if parts else x.new_empty(0, len(weight))


def load_head(path: Path, wanted: str, user_width: int | None) -> Head:
    """Read and check a head. wanted: the kind that --score needs. user_width: of the users' vectors, None: any.

    Raises:
        ItemsError: unreadable, another kind, a tensor that is missing, superfluous, ill-shaped or not finite.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise ItemsError(f"--head {path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except Exception as error:  # the library's own kind, or the system's
        raise ItemsError(f"--head {path}: not readable as safetensors: {first_line(error)}") from None
    kind, activation = metadata.get("head", ""), metadata.get("activation", "")
    if kind not in KINDS:
        raise ItemsError(f"--head {path}: the metadata must say head = {' or '.join(KINDS)}, not {kind!r}")
    if kind != wanted:
        other = "--score mlp" if kind == "mlp" else "--score dot or cosine"
        raise ItemsError(f"--head {path}: this is a head of kind {kind}, which goes with {other}")
    if activation not in ACTIVATIONS:
        close = nearest(activation, ACTIVATIONS)
        raise ItemsError(f"--head {path}: activation must be {', '.join(ACTIVATIONS)}, not {activation!r}{close}")
    return Head(kind, activation, _layers(path, kind, tensors, user_width), digest)


def _layers(path: Path, kind: str, tensors: dict[str, Tensor], user_width: int | None) -> tuple[tuple[Tensor, Tensor], ...]:
    numbers = [int(m[1]) for name in tensors if (m := re.fullmatch(r"layers\.(\d{1,4})\.(weight|bias)", name))]
    count = max(max(numbers, default=0) + 1, 2 if kind == "mlp" else 1)
    names = [f"layers.{i}.{what}" for i in range(count) for what in ("weight", "bias")]
    for problem, found in (
        ("missing", [name for name in names if name not in tensors]),
        ("without a place in the head", sorted(set(tensors) - set(names))),
        ("not of floats", [name for name in names if name in tensors and not tensors[name].is_floating_point()]),
    ):
        if found:
            raise ItemsError(f"--head {path}: tensors {problem}: {', '.join(found[:3])}")
    layers = []
    width: int | None = None if kind == "mlp" else user_width
    for i in range(count):
        weight, bias = (tensors[f"layers.{i}.{what}"].float() for what in ("weight", "bias"))
        _check(path, f"layers.{i}.weight", weight, (1 if kind == "mlp" and i == count - 1 else None, width))
        _check(path, f"layers.{i}.bias", bias, (len(weight),))
        layers.append((weight.contiguous(), bias.contiguous()))
        width = len(weight)
    if kind == "mlp" and user_width and layers[0][0].shape[1] <= user_width:
        raise ItemsError(
            f"--head {path}: layers.0.weight is {list(layers[0][0].shape)}; its columns are the user's, {user_width}, and "
            "then the item's"
        )
    return tuple(layers)


def _check(path: Path, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = tensor.ndim == len(shape) and all(size in (None, real) for size, real in zip(shape, tensor.shape, strict=True))
    if not fits or not tensor.numel():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ItemsError(f"--head {path}: {name} is {list(tensor.shape)}; it must be [{wanted}]")
    if not bool(torch.isfinite(tensor).all()):
        raise ItemsError(f"--head {path}: {name} holds NaN or infinity")


class PairHead:
    """An `mlp` head, its first layer split: a user's part and an item's, each multiplied once and not once a pair.

    Both parts are rounded to float32; a pair's score is what follows from them in float64, rounded once.
    """

    def __init__(self, head: Head, user_width: int) -> None:
        first, bias = head.layers[0]
        self.head = head
        self.item_width = first.shape[1] - user_width
        self._of_user, self._of_item = first[:, :user_width].contiguous(), first[:, user_width:].contiguous()
        self._bias = bias
        self.middle = head.layers[1:-1]
        self.last, self.last_bias = head.layers[-1][0][0], head.layers[-1][1]

    @property
    def hidden(self) -> int:
        return len(self._of_user)

    def on(self, device: str) -> "PairHead":
        """The same with what `scanned` needs on a device."""
        other = copy.copy(self)
        other.middle = tuple((weight.to(device), bias.to(device)) for weight, bias in self.middle)
        other.last, other.last_bias = self.last.to(device), self.last_bias.to(device)
        return other

    def users(self, vectors: npt.NDArray[np.float32]) -> Tensor:
        """[n, hidden]."""
        return linear(tensor(vectors), self._of_user, self._bias)

    def items(self, vectors: npt.NDArray[np.float32]) -> Tensor:
        """[m, hidden]."""
        return linear(tensor(vectors), self._of_item, None, 1_024)

    def exact(self, users: Tensor, items: Tensor, bias: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
        """[m] scores of m pairs from their parts [m, hidden]; bias [m] of the items."""
        x = self.head.act(users.double() + items.double())
        for weight, offset in self.middle:
            x = self.head.act(linear(x, weight.double(), offset.double(), 256))
        products = F.pad(x * self.last.double(), (0, -x.shape[1] % 8))
        sums = products.new_zeros(len(products), 8)
        for strand in torch.split(products, 8, 1):  # an order that depends on the width alone
            sums += strand
        a, b, c, d, e, f, g, h = sums.T
        totals: npt.NDArray[Any] = (((a + e) + (c + g)) + ((b + f) + (d + h)) + self.last_bias.double()).numpy()
        return (totals if bias is None else totals + bias).astype(np.float32)

    def scanned(self, user: Tensor, items: Tensor, buffer: Tensor) -> Tensor:
        """[m] scores in float32 of one user's part [hidden] and items' [m, hidden]; buffer: of the items' shape."""
        x = torch.add(items, user, out=buffer)
        x = torch.relu_(x) if self.head.activation == "relu" else self.head.act(x)
        for weight, offset in self.middle:
            x = self.head.act(F.linear(x, weight, offset))
        return torch.mv(x, self.last).add_(self.last_bias)

    def reach_and_error(self, users: Tensor, largest: npt.NDArray[np.float64]) -> tuple[Any, Any]:
        """[n] the largest number that is possible in any layer, and by how much `scanned` may miss `exact`.

        users [n, hidden]; largest [hidden]: the largest magnitude of the items' parts. Layer by layer: no activation's value
        is larger than its argument's; sums are off by at most what topk.py says of them, and each activation by 8 units.
        """
        unit = 2.0**-24
        reach = users.double().abs() + torch.from_numpy(largest)
        most = reach.amax(1)
        error = (STEEPEST + 8) * unit * reach
        for weight, offset in (*self.middle, (self.last[None], self.last_bias)):
            w, b = weight.double().abs(), offset.double().abs()
            rounding = 2 * (w.shape[1] + 4) * unit
            error = error @ w.T
            reach = reach @ w.T + b
            error = STEEPEST * (error + rounding * reach) + 8 * unit * reach
            most = torch.maximum(most, reach.amax(1))
        return most.numpy(), error[:, 0].numpy()
