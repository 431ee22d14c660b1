"""Installing the runner: which vLLM, whose hook; with stand-ins for vLLM, so that it runs everywhere."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

import epmoe.vllm_plugin
from epmoe.core.errors import UnsupportedError
from epmoe.vllm_plugin import hook
from epmoe.vllm_plugin.settings import Settings

ASKED = Settings(stage="02_fixed_capacity")
FORGIVING = Settings(stage="02_fixed_capacity", fallback=True)


class PluggableLayer:
    """As vLLM's, as far as it matters here."""


class MoERunner(PluggableLayer):
    def __init__(self, layer_name, moe_config, router, routed_experts): ...

    def _apply_quant_method(
        self, hidden_states, router_logits, shared_experts_input, input_ids
    ): ...

    def _maybe_apply_shared_experts(self, shared_experts_input, order): ...

    def _select_forward(self): ...

    @property
    def _fused_output_is_reduced(self): ...

    @property
    def do_naive_dispatch_combine(self): ...


@pytest.fixture
def vllm(monkeypatch):
    """A vllm package that has a version and nothing else."""
    module = ModuleType("vllm")
    vars(module)["__version__"] = "0.32.0"
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(hook, "active", None)
    return module


def test_the_entry_point_is_there_and_light():
    """vLLM swallows what an import raises, so importing must have nothing to raise: neither torch nor vLLM."""
    (entry,) = entry_points(group="vllm.general_plugins", name="epmoe")
    assert entry.value == "epmoe.vllm_plugin:register"
    code = (
        "import epmoe.vllm_plugin, sys; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [None, "native"])
def test_not_asked_it_does_nothing(monkeypatch, value):
    monkeypatch.delenv("EPMOE_STAGE", raising=False)
    if value:
        monkeypatch.setenv("EPMOE_STAGE", value)
    monkeypatch.setattr(hook, "install", lambda _: pytest.fail("installed"))
    epmoe.vllm_plugin.register()


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnsupportedError, match=r"vLLM cannot be imported.*vLLM 0.32.x and 0.33.x"):
        hook.install(ASKED)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.3", "dev"])
def test_another_version_is_named_with_those_that_work(vllm, version):
    vars(vllm)["__version__"] = version
    with pytest.raises(UnsupportedError, match=rf"vLLM {version} is installed.*0.32.x and 0.33.x"):
        hook.install(ASKED)


def test_moved_modules_are_named(vllm):
    with pytest.raises(UnsupportedError, match="is not where it was"):
        hook.install(ASKED)


def test_with_fallback_vllm_starts_natively_and_it_is_said(vllm, caplog):
    vars(vllm)["__version__"] = "0.40.0"
    with caplog.at_level(logging.WARNING, "vllm.epmoe"):
        hook.install(FORGIVING)
    assert "vLLM runs its own experts" in caplog.text
    assert hook.active is None


def test_the_hook_as_we_know_it():
    assert hook.hook_reasons(MoERunner, None) == []


def test_every_change_of_the_hook_is_a_reason():
    class Other:
        def __init__(self, layer_name, moe_config, router): ...

        def _apply_quant_method(self, hidden_states, router_logits): ...

    reasons = "; ".join(hook.hook_reasons(Other, PluggableLayer))
    for words in (
        "PluggableLayer replaces MoERunner already",
        "is no PluggableLayer",
        "__init__ has no argument routed_experts",
        "_apply_quant_method has no argument shared_experts_input",
        "_select_forward is gone",
        "do_naive_dispatch_combine is gone",
    ):
        assert words in reasons
