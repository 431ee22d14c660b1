"""What an exchange delivers to experts, and what experts can work with: promises with names, checked twice.

When two parts are put together, every promise of the exchange is held against what the experts accept; a pair that
does not fit is refused in words. In checked mode (`check=True`) the delivered tensors are held against the promises in
every call, so that whoever writes an exchange is told which one it broke. What only values can show (a slot of the
right range that is another expert's) is left to the conformance suite.

Legend: R received rows, J places of a row, H hidden, C capacity of a call, EP ranks, K experts per token, E experts.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from epmoe.core.errors import InputError

if TYPE_CHECKING:
    from epmoe.core.layer_spec import LayerSpec
    from epmoe.core.split import Rows

Layout = Literal["contiguous", "strided"]
Ids = Literal["slots", "global"]
Empty = Literal["minus_one", "never"]
Places = Literal["topk", "one"]
Weigher = Literal["experts", "source"]
Sizes = Literal["static", "data"]


# --8<-- [start:delivers]
@dataclass(frozen=True, kw_only=True)
class Delivers:
    """What an exchange promises of all `Rows` that it delivers. A field left out says what is usual here.

    Attributes:
        places: of a row. "topk": a whole token travels, J = K; "one": one assignment travels, J = 1.
        sizes: "static": R follows from the capacity of the call alone; "data": from the routing too, and no row is
            delivered that this rank does not need. In both, R * J is at most EP * C * K.
        layout: "contiguous" rows, or "strided": rows some distance apart, such as views of packed rows. The values of
            one row are adjacent in both.
        ids: "slots" of this rank's weights, or "global" expert ids.
        empty: a place without an expert of this rank. "minus_one": its id is -1, its weight and, where no place of the
            row has one, its row may hold anything, NaN included; "never": there is no such place.
        weighed_by: "experts": y[r] is the sum over J of weight times f(x[r]), added up in float32; "source": y[r] is
            f(x[r]) as it is, and `combine` weighs it at home, for which a row can have one place only.
        sums: dtype of the y_RH [R, H], contiguous, that `combine` takes.
    """

    places: Places
    sizes: Sizes
    layout: Layout = "contiguous"
    ids: Ids = "slots"
    empty: Empty = "minus_one"
    weighed_by: Weigher = "experts"
    sums: torch.dtype = torch.float32

    def __post_init__(self):
        if self.weighed_by == "source" and self.places != "one":
            raise InputError(
                f"weighed_by='source' with places={self.places!r}: a row of several places comes home as one sum, "
                "which nobody can weigh any more; deliver places='one', or leave the weights to the experts"
            )


# --8<-- [end:delivers]


@dataclass(frozen=True, kw_only=True)
class Accepts:
    """What experts can work with: for each field of `Delivers`, every value that they take.

    A field left out says what all experts of this repository take.
    """

    places: tuple[Places, ...] = ("topk", "one")
    sizes: tuple[Sizes, ...] = ("static", "data")
    layout: tuple[Layout, ...] = ("contiguous", "strided")
    ids: tuple[Ids, ...] = ("slots",)
    empty: tuple[Empty, ...] = ("minus_one", "never")
    weighed_by: tuple[Weigher, ...] = ("experts",)
    sums: tuple[torch.dtype, ...] = (torch.float32,)


def misfits(delivers: Delivers, accepts: Accepts) -> list[tuple[str, object, tuple]]:
    """(field, delivered value, accepted values) of every promise that the experts cannot work with."""
    pairs = ((f.name, getattr(delivers, f.name), getattr(accepts, f.name)) for f in fields(Accepts))
    return [(name, value, taken) for name, value, taken in pairs if value not in taken]


class DeliveryCheck:
    """Holds what an exchange delivers, and what experts answer, against the promises. Reads device values.

    One for each layer: it remembers R by capacity, which "static" exchanges may not change.
    """

    def __init__(self, spec: "LayerSpec", delivers: Delivers):
        self.spec, self.delivers = spec, delivers
        self._rows_by_capacity: dict[int, int] = {}

    def broken_by(self, rows: "Rows", capacity: int) -> str | None:
        """The first promise that these rows break, in words, or None."""
        return (
            self._tensors(rows)
            or self._sizes(rows, capacity)
            or self._layout(rows.x_RH)
            or self._ids(rows.slots_RJ)
        )

    def unfit_answer(self, rows: "Rows", y_RH: Tensor) -> str | None:
        """What is wrong with the experts' answer, in words, or None."""
        return _unlike("y", y_RH, tuple(rows.x_RH.shape), self.delivers.sums, rows.x_RH.device) or (
            None if y_RH.is_contiguous() else f"y has strides {y_RH.stride()}: give it contiguous"
        )

    def _tensors(self, rows: "Rows") -> str | None:
        shape, device = self.spec.shape, self.spec.device
        count = rows.x_RH.shape[0] if rows.x_RH.dim() else 0
        places = shape.topk if self.delivers.places == "topk" else 1
        return (
            _unlike("x", rows.x_RH, (count, shape.hidden), self.spec.dtype, device)
            or _unlike("slots", rows.slots_RJ, (count, places), torch.int32, device)
            or _unlike("weights", rows.weights_RJ, (count, places), torch.float32, device)
        )

    def _sizes(self, rows: "Rows", capacity: int) -> str | None:
        count, most = len(rows.x_RH), self.spec.group.size * capacity * self.spec.shape.topk
        if rows.slots_RJ.numel() > most:
            return (
                f"{rows.slots_RJ.numel()} places were delivered: at most EP * C * K = {most} can be"
            )
        if self.delivers.sizes == "data":
            return None
        before = self._rows_by_capacity.setdefault(capacity, count)
        if before == count:
            return None
        return f"sizes='static', but R is {count} and was {before} in an earlier call of capacity {capacity}"

    def _layout(self, x_RH: Tensor) -> str | None:
        if self.delivers.layout == "contiguous" and not x_RH.is_contiguous():
            return f"layout='contiguous', but x has strides {x_RH.stride()}: say 'strided'"
        if x_RH.numel() and x_RH.shape[1] > 1 and x_RH.stride(1) != 1:
            return f"x has strides {x_RH.stride()}: the values of a row must be adjacent"
        return None

    def _ids(self, ids_RJ: Tensor) -> str | None:
        if self.delivers.ids == "slots":
            end, what = self.spec.weights.experts, "slots of this rank"
        else:
            end, what = self.spec.shape.experts, "expert ids"
        least = 0 if self.delivers.empty == "never" else -1
        wrong = ids_RJ[(ids_RJ < least) | (ids_RJ >= end)]
        if not wrong.numel():
            return None
        promise = f"ids='{self.delivers.ids}', empty='{self.delivers.empty}'"
        return f"{promise}, but an id is {int(wrong[0])}: {what} are {least} to {end - 1}"


def _unlike(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    if tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device.type == device.type:
        return None
    got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    return f"{name} is {got}: expected {shape} {dtype} on {device.type}"
