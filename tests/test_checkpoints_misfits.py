"""A config.json and weights that are not of one checkpoint: said in one line, before anything computes with them."""

import json
import shutil
from pathlib import Path

import pytest

from epmoe.core.checkpoints import hidden_states
from epmoe.core.errors import InputError

TINY = Path(__file__).parents[1] / "models" / "tiny-glm-moe"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "vocab_size",
            328,
            r"lm_head\.weight .* \(320, 128\), but config\.json asks for \(328, 128\)",
        ),
        ("num_hidden_layers", 6, r"model\.layers\.5\.\S+ is missing"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named_in_one_line(
    tmp_path, capfd, field, value, words
):
    """Even where no MoE layer is concerned: transformers would go on with weights that nobody trained."""
    copied = shutil.copytree(TINY, tmp_path / "tiny")
    config = copied / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(InputError, match=words) as refused:
        hidden_states(copied, 1, "words", 4)
    assert "ignore_mismatched_sizes" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "REPORT" not in "".join(capfd.readouterr())
