"""The official hook: vLLM asks a registry, at the moment a runner is made, whether somebody brings another class.

Registered under the name of vLLM's own runner, so it does not matter in which order modules were imported.
"""

# pyright: reportMissingImports=false
import inspect
import logging
import re
from dataclasses import asdict
from typing import Any

from epmoe.core.errors import UnsupportedError
from epmoe.vllm_plugin.settings import NATIVE, Settings, read

RUNNER = "MoERunner"
TRIED = ("0.32", "0.33")  # of 0.33 its Python sources over the compiled part of 0.32
WORDS = f"vLLM {TRIED[0]}.x and {TRIED[-1]}.x"
# what the runner overrides or calls, and the arguments that it relies on
EXPECTED = {
    "__init__": ("layer_name", "moe_config", "router", "routed_experts"),
    "_apply_quant_method": ("hidden_states", "router_logits", "shared_experts_input", "input_ids"),
    "_maybe_apply_shared_experts": ("shared_experts_input", "order"),
    "_select_forward": (),
    "_fused_output_is_reduced": None,
    "do_naive_dispatch_combine": None,
}

log = logging.getLogger("vllm.epmoe")  # below vLLM's own logger, so that its level and format apply
active: Settings | None = None
_installed: Settings | None = None  # from the environment, when vLLM asked for its plugins


def install(settings: Settings) -> None:
    """Register the runner that runs `settings.stage`; once per process, again is harmless.

    Raises:
        UnsupportedError: the version or the hook is not as expected, or the hook is taken; with every reason. With
            EPMOE_FALLBACK=native it is logged instead and vLLM stays as it is.
    """
    global active, _installed
    try:
        _refuse_other_versions(installed_version())
        registry, runner, register_oot = _find_hook()
        holder = registry.get(RUNNER)
        if holder is not None and holder.__module__.startswith("epmoe.vllm_plugin"):
            _refuse_change(settings, active)
            return
        reasons = hook_reasons(runner, holder)
        if reasons:
            raise UnsupportedError(
                f"EPMOE_STAGE={settings.stage} cannot be installed: {'; '.join(reasons)}"
            )
    except UnsupportedError as error:
        if not settings.fallback:
            raise
        log.warning("%s. EPMOE_FALLBACK=native: vLLM runs its own experts.", error)
        return
    from epmoe.vllm_plugin.runner import StagedMoERunner

    active = _installed = settings
    register_oot(StagedMoERunner, name=RUNNER)
    log.info("routed experts run on epmoe's %s", settings.stage)


def installed_version() -> str:
    """vLLM's own word for its version: its CPU build has other package metadata."""
    try:
        import vllm
    except ImportError as error:
        raise UnsupportedError(
            f"vLLM cannot be imported: {error!r}; this plugin is for {WORDS}"
        ) from error
    return str(vllm.__version__)


def _refuse_other_versions(version: str) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or f"{match[1]}.{match[2]}" not in TRIED:
        raise UnsupportedError(
            f"vLLM {version} is installed, this plugin is for {WORDS}: install one of these, or unset EPMOE_STAGE"
        )


def _find_hook() -> tuple[dict[str, type], type, Any]:
    """(the registry, the class to replace, the function that registers); moved modules are an UnsupportedError."""
    try:
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    except ImportError as error:
        raise UnsupportedError(f"vLLM's hook for runners is not where it was: {error!r}") from error
    return op_registry_oot, MoERunner, PluggableLayer.register_oot


def hook_reasons(runner: Any, holder: Any) -> list[str]:
    """Why the hook cannot be used, in words: held by another plugin, or a runner that is not the one we know."""
    reasons = []
    if holder is not None:
        reasons.append(
            f"{holder.__module__}.{holder.__qualname__} replaces {RUNNER} already: remove that plugin"
        )
    if "PluggableLayer" not in [base.__name__ for base in runner.__mro__]:
        reasons.append(f"{RUNNER} is no PluggableLayer, so vLLM would ignore a replacement")
    for name, arguments in EXPECTED.items():
        found = getattr(runner, name, None)
        if found is None:
            reasons.append(f"{RUNNER}.{name} is gone")
        elif arguments is not None:
            known = inspect.signature(found).parameters
            lost = [argument for argument in arguments if argument not in known]
            reasons += [f"{RUNNER}.{name} has no argument {argument}" for argument in lost]
    return reasons


def refuse_other_environment() -> None:
    """vLLM loads plugins once in a process: a second engine with other variables would run with the first one's.

    Raises:
        UnsupportedError: what is set now is not what was installed.
    """
    if _installed is not None:
        _refuse_change(read(), _installed)


def _refuse_change(wanted: Settings | None, running: Settings | None) -> None:
    if running is None or wanted == running:
        return
    ours, theirs = asdict(running), asdict(wanted) if wanted else {"stage": NATIVE}
    changed = [f"{k}={theirs[k]!r} (was {ours[k]!r})" for k in theirs if theirs[k] != ours[k]]
    raise UnsupportedError(
        f"this process has installed {running.stage} already and cannot change to {', '.join(changed)}: start a new one"
    )


def current() -> Settings:
    """The settings of the installed runner."""
    assert active is not None, "no stage is installed"
    return active
