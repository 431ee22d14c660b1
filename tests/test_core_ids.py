"""Ids of any width: which name an expert, and what the others find."""

import pytest
import torch

from epmoe.core.ids import clamped, look_up, named

IDS = torch.tensor([[0, 3], [-1, 4], [2**32 + 1, -(2**63)]])


def test_only_ids_within_the_experts_name_one():
    assert named(IDS, 4).tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_nobody_is_found_for_the_others(dtype):
    """In the table's dtype, whatever the ids are."""
    table_E = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    ids = IDS[:2].to(dtype)
    found = look_up(table_E, ids, 9)
    assert found.tolist() == [[5, 8], [9, 9]]
    assert found.dtype is torch.int32


def test_wide_ids_mean_the_same_in_int32():
    assert clamped(IDS, 4).to(torch.int32).tolist() == [[0, 3], [-1, 4], [4, -1]]
    narrow = IDS[:2].to(torch.int32)
    assert clamped(narrow, 4) is narrow
