"""config.json of a checkpoint, and what transformers makes of a folder: whatever is wrong there is an InputError."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from epmoe.core.checkpoints.families import Family, family_of
from epmoe.core.errors import InputError
from epmoe.core.reading import read_json
from epmoe.core.shape import MoEShape
from epmoe.core.values import is_whole

MOST_LAYERS = 10_000
SILU = ("silu", "swish")  # one function under two names


def read_config(folder: Path) -> tuple[str, Any]:
    """(architecture, transformers config); refuses what cannot be read before transformers looks at it."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{file} does not exist: give the folder of a Hugging Face checkpoint")
    raw = read_json(file, "model configuration")
    if not isinstance(raw, dict):
        raise _no_config(folder, "it is no JSON object")
    architecture = _architecture(folder, raw)
    family_of(architecture)
    _refuse_endless(folder, raw.get("num_hidden_layers", 1))
    _refuse_quantised(folder, raw.get("quantization_config") or raw.get("compression_config"))
    config = load_config(folder)
    _refuse_activation(folder, config.hidden_act)
    return architecture, config


def load_config(folder: Path) -> Any:
    """What transformers reads from config.json."""
    from transformers import AutoConfig

    return by_transformers(AutoConfig.from_pretrained, folder, "config.json")


def read_sizes(folder: Path, family: Family, config: Any) -> tuple[MoEShape, tuple[int, ...]]:
    """The shape of the MoE layers, and which layers these are."""
    try:
        return family.shape(config), family.moe_layers(config)
    except (ValueError, AttributeError, TypeError, ArithmeticError) as error:
        raise _no_config(folder, error) from error


def by_transformers(load: Callable[[Path], Any], folder: Path, what: str) -> Any:
    """What `load` of transformers returns; InputError for whatever it raises about the folder's files."""
    try:
        return load(folder)
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, some of them other packages'
        words = " ".join(str(error).split())  # some are several lines
        raise InputError(
            f"{folder} holds no {what} that transformers can load: {words}; give a checkpoint as it was published"
        ) from error


def load_model(folder: Path) -> Any:
    """The transformers model in float32 on the CPU, for inference. InputError, in one line, where config.json asks for
    a weight that the files lack or hold in another shape: transformers would make that one up."""
    from transformers import AutoModelForCausalLM

    load = partial(
        AutoModelForCausalLM.from_pretrained,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, without advice to ignore them
    )
    with _quiet():
        model, told = by_transformers(load, folder, "model")
    for name, stored, wanted in sorted(told["mismatched_keys"]):
        raise InputError(
            f"tensor {name} of {folder} has shape {tuple(stored)}, but config.json asks for {tuple(wanted)}: give the "
            "config and the weights of one checkpoint"
        )
    for name in sorted(told["missing_keys"]):
        raise InputError(
            f"tensor {name} is missing from {folder}, but config.json asks for it: give the config and the weights of "
            "one checkpoint"
        )
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of many lines: what is wrong is said here, in one."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _architecture(folder: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or ["none named"]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise _no_config(folder, f"architectures={named!r} is no list of names")
    return named[0]


def _refuse_endless(folder: Path, layers: object) -> None:
    """transformers lists what each layer is; a slip of the pen would take all memory."""
    if not is_whole(layers) or not 1 <= layers <= MOST_LAYERS:
        raise _no_config(
            folder, f"num_hidden_layers={layers!r} is no whole number of 1 to {MOST_LAYERS}"
        )


def _refuse_activation(folder: Path, activation: object) -> None:
    if activation not in SILU:
        raise _no_config(
            folder, f"hidden_act={activation!r}: experts are read with {' or '.join(SILU)} only"
        )


def _refuse_quantised(folder: Path, found: Any) -> None:
    if found:
        method = found.get("quant_method", "unknown method") if isinstance(found, dict) else found
        raise InputError(
            f"{folder} is quantised ({method}): only float weights are read, give the bf16 checkpoint"
        )


def _no_config(folder: Path, why: object) -> InputError:
    return InputError(f"no MoE model in {folder / 'config.json'}: {why}")
