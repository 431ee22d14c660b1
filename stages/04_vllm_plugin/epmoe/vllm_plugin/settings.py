"""What the environment asks for. Imports neither torch nor vLLM: it runs in every process that vLLM starts."""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epmoe.core.errors import InputError

STAGE, NATIVE = "EPMOE_STAGE", "native"
# in comparisons: how far vLLM is from itself without compiler and CUDA graphs
NATIVE_EAGER = "native-eager"
VARIABLES = {
    STAGE: "the stage that runs the routed experts; unset or `native` leaves vLLM alone",
    "EPMOE_STAGE_OPTIONS": 'options of that stage as a JSON object, such as {"without": "merge"}',
    "EPMOE_FALLBACK": "`native`: a layer that the stage cannot serve runs on vLLM's own code, and says so",
    "EPMOE_CAPACITY": "tokens per rank that buffers are made for; larger steps run as several rounds",
    "EPMOE_COUNT": "`1`: calls are counted on the device too, so that replays of a CUDA graph show",
    "EPMOE_REPORT": "a folder where every worker writes rank-<r>.json: which stage runs, and how often it was called",
}
# read elsewhere in this project; listed so that they are not taken for slips
ELSEWHERE = ("EPMOE_CHECK", "EPMOE_GIT_SHA", "EPMOE_NCCL_LIBRARY", "EPMOE_VLLM_PYTHON")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One reading of the environment.

    Attributes:
        stage: the registered name.
        options: of the stage, passed on to `build`.
        fallback: whether an unsupported layer may run natively instead of ending the start.
        capacity: C, tokens per rank; None for what vLLM may bring.
        count: whether calls are counted on the device.
        report: folder of the workers' reports, None for none.
    """

    stage: str
    options: dict[str, Any] = field(default_factory=dict)
    fallback: bool = False
    capacity: int | None = None
    count: bool = False
    report: str | None = None


def read(environment: Mapping[str, str] | None = None) -> Settings | None:
    """The settings, or None where vLLM is to be left alone.

    Raises:
        InputError: an unknown stage (with the list of stages), a value that is none, or a variable that looks like a
            slip of one of ours: ignored, it would change what runs without a word.
    """
    env = os.environ if environment is None else environment
    _refuse_slips(env)
    name = env.get(STAGE, "").strip()
    if name in ("", NATIVE):
        return None
    from epmoe.core import registry

    try:
        stage = registry.resolve(name)
    except InputError as error:
        raise InputError(f"{STAGE}={name}: {error}, or {NATIVE}") from error
    return Settings(
        stage=stage,
        options=_options(env.get("EPMOE_STAGE_OPTIONS", "")),
        fallback=_fallback(env.get("EPMOE_FALLBACK", "")),
        capacity=_capacity(env.get("EPMOE_CAPACITY", "")),
        count=env.get("EPMOE_COUNT", "") not in ("", "0"),
        report=env.get("EPMOE_REPORT") or None,
    )


def _refuse_slips(env: Mapping[str, str]) -> None:
    known = (*VARIABLES, *ELSEWHERE)
    for name in env:
        if not name.startswith("EPMOE") or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            raise InputError(f"{name} is no variable of this plugin: did you mean {near[0]}?")


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"EPMOE_STAGE_OPTIONS={text!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"EPMOE_STAGE_OPTIONS={text!r}: give a JSON object of options")
    own = sorted({"workspace", "overflow", "check"} & set(options))
    if own:
        raise InputError(f"EPMOE_STAGE_OPTIONS: the plugin decides {', '.join(own)}: leave it out")
    return options


def _fallback(text: str) -> bool:
    if text not in ("", NATIVE):
        raise InputError(
            f"EPMOE_FALLBACK={text!r}: the only fallback is `{NATIVE}`; unset it for none"
        )
    return text == NATIVE


def _capacity(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"EPMOE_CAPACITY={text!r}: give a whole number of at least 1")
    return int(text)
