"""Named tensors of a safetensors checkpoint, one file or many, read by memory map one at a time."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.reading import read_json
from epmoe.core.values import DTYPES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# what safetensors headers call the dtypes that hold plain weights; all others are packed or quantised
PLAIN = {
    "F64": DTYPES["float64"],
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
}


class TensorFiles:
    """The tensors of the checkpoint folder `path`; use as a context manager, which closes the files.

    Opening reads only headers. `read` maps the file and touches the pages of the asked tensor alone.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *details: object) -> None:
        self._open.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    def open_all(self) -> None:
        """Read the header of every file; InputError where one is missing, or shorter than its header says."""
        for file in sorted(set(self._file_of.values())):
            self._file(file)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in; InputError for a quantised one."""
        stored = self._slice(name).get_dtype()
        if stored not in PLAIN:
            raise InputError(
                f"tensor {name} is stored as {stored}, a quantised format: only {', '.join(PLAIN)} are read, "
                "so give a checkpoint that is not quantised"
            )
        return PLAIN[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name` as stored, on the CPU; InputError if missing, quantised, or not of `shape`."""
        self.dtype(name)
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise InputError(f"tensor {name} has shape {found}, but config.json asks for {shape}")
        return self._handle(name).get_tensor(name)

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(name).get_slice(name)
        except SafetensorError as error:  # only an index can name what is not there
            raise InputError(
                f"{INDEX} says that {self.path / self._file_of[name]} holds tensor {name}, which it does not: give the "
                "index and the files of one checkpoint"
            ) from error

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise InputError(
                f"tensor {name} is missing from {self.path}: the checkpoint is not complete"
            )
        return self._file(self._file_of[name])

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                handle = self._stack.enter_context(
                    safe_open(self.path / file, framework="pt", device="cpu")
                )
            except FileNotFoundError:
                raise InputError(f"{INDEX} names {file}, which is not in {self.path}") from None
            except (SafetensorError, OSError) as error:  # OSError: a folder, for one
                raise InputError(
                    f"{self.path / file} is no whole safetensors file: {error}"
                ) from error
            self._open[file] = handle
        return self._open[file]

    def _locate(self) -> dict[str, str]:
        # first, as transformers does: an index beside it may be an old one
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        if (self.path / INDEX).is_file():
            return _weight_map(self.path / INDEX)
        raise InputError(
            f"{self.path} holds neither {SINGLE} nor {INDEX}: only safetensors checkpoints are read"
        )


def check_files(path: str | Path) -> None:
    """Raise InputError where a safetensors file of the checkpoint folder is damaged or missing; loads no weights.

    A folder without such files passes: what serves it may read others.
    """
    folder = Path(path)
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        with TensorFiles(folder) as files:
            files.open_all()


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, as the index of a checkpoint of several files says. Raises InputError for anything else."""
    data = read_json(index, "index of tensors")
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise InputError(
            f"no index of tensors in {index}: weight_map has to name the file of every tensor; give a checkpoint as "
            "it was published"
        )
    return found
