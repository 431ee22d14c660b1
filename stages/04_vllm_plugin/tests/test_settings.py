"""What EPMOE_ variables mean, and that nothing of it is ignored in silence."""

import pytest

from epmoe.core.errors import InputError
from epmoe.vllm_plugin.settings import Settings, read


@pytest.mark.parametrize("environment", [{}, {"EPMOE_STAGE": ""}, {"EPMOE_STAGE": "native"}])
def test_unset_and_native_leave_vllm_alone(environment):
    assert read(environment) is None


@pytest.mark.parametrize("name", ["02", "fixed_capacity", "02_fixed_capacity", " 02 "])
def test_a_stage_has_three_names(name):
    assert read({"EPMOE_STAGE": name}) == Settings(stage="02_fixed_capacity")


def test_an_unknown_stage_is_refused_with_the_list():
    with pytest.raises(InputError, match=r"EPMOE_STAGE=fast.*01_variable_a2a.*or native"):
        read({"EPMOE_STAGE": "fast"})


@pytest.mark.parametrize("slip", ["EPMOE_STAGES", "EPMOE_STGE", "EPMOE_FALBACK", "EPMOESTAGE"])
def test_a_slip_in_a_name_is_no_silent_native(slip):
    with pytest.raises(InputError, match="did you mean EPMOE_"):
        read({slip: "02"})


def test_variables_of_others_are_left_alone():
    assert read({"EPMOE_CHECK": "1", "EPMOE_GIT_SHA": "abc", "EPMOE_MY_NOTES": "x"}) is None


def test_everything_at_once():
    found = read(
        {
            "EPMOE_STAGE": "03",
            "EPMOE_STAGE_OPTIONS": '{"without": "merge"}',
            "EPMOE_FALLBACK": "native",
            "EPMOE_CAPACITY": "512",
            "EPMOE_COUNT": "1",
            "EPMOE_REPORT": "/somewhere",
        }
    )
    assert found == Settings(
        stage="03_fused_triton",
        options={"without": "merge"},
        fallback=True,
        capacity=512,
        count=True,
        report="/somewhere",
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EPMOE_STAGE_OPTIONS", "{", "is not JSON"),
        ("EPMOE_STAGE_OPTIONS", "[]", "a JSON object"),
        ("EPMOE_STAGE_OPTIONS", '{"workspace": 1}', "the plugin decides workspace"),
        ("EPMOE_FALLBACK", "yes", "the only fallback is `native`"),
        ("EPMOE_CAPACITY", "0", "at least 1"),
        ("EPMOE_CAPACITY", "many", "a whole number"),
    ],
)
def test_values_that_are_none(name, value, words):
    with pytest.raises(InputError, match=words):
        read({"EPMOE_STAGE": "02", name: value})
