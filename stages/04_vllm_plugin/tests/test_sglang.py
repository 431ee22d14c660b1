"""The code in SGLANG.md runs, against stand-ins of the SGLang names that it uses."""

import re
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest
import torch

from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights

PAGE = Path(__file__).resolve().parents[1] / "SGLANG.md"
SHAPE = MoEShape(hidden=8, intermediate=4, experts=4, topk=2)
TopK = namedtuple("TopK", "topk_weights topk_ids router_logits")


class FusedMoE(torch.nn.Module):
    """What SGLang's layer holds, as far as the page names it."""

    def __init__(self, weights, up_first=False):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(weights.w13_E2IH, requires_grad=False)
        self.w2_weight = torch.nn.Parameter(weights.w2_EHI, requires_grad=False)
        self.num_experts, self.top_k, self.moe_ep_size = SHAPE.experts, SHAPE.topk, 1
        self.quant_method = type("Method", (), {"load_up_proj_weight_first": up_first})()


@pytest.fixture
def page(monkeypatch) -> dict:
    """What the page's code defines."""
    path = ""
    for part in ["sglang", "srt", "layers", "moe", "fused_moe_triton", "layer"]:
        path = f"{path}.{part}".lstrip(".")
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    vars(sys.modules[path])["FusedMoE"] = FusedMoE
    (code,) = re.findall(r"<!-- tested: .*? -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_code_of_the_page_computes_the_layer(page):
    weights = random_weights(SHAPE, range(4))
    layer = page["StagedMoE"](weights)
    layer.place()
    x_TH, logits_TE = torch.randn(5, 8), torch.randn(5, 4)
    ids_TK, weights_TK = route(logits_TE, SHAPE.router, 2)
    ids_TK[4] = -1  # as SGLang marks padding
    found = layer(x_TH, TopK(weights_TK, ids_TK, logits_TE))
    reference = build("00", SHAPE, weights, contiguous(4, 1), layer.stage.spec.group, 5)
    assert torch.allclose(found, reference(x_TH, ids_TK, weights_TK), atol=1e-5)
    assert not found[4].any()


def test_the_other_order_of_gate_and_up_is_not_taken(page):
    with pytest.raises(AssertionError):
        page["StagedMoE"](random_weights(SHAPE, range(4)), up_first=True).place()
