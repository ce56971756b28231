"""Bytes are counted by the tensors' own types, in every direction."""

import torch

from flrce.payload_bytes import count_bytes, count_value_bytes


def test_bytes_are_counted_by_each_tensors_own_type():
    tensors = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.uint8), "c": torch.zeros(0)}
    assert count_bytes(tensors) == 29
    assert count_bytes(tensors.values()) == 29
    assert count_bytes(torch.zeros(2, 2, dtype=torch.float16)) == 8
    assert count_bytes({}) == count_bytes([]) == 0


def test_values_that_do_not_exist_yet_are_counted_by_the_type_they_will_have():
    assert count_value_bytes(10) == 40
    assert count_value_bytes(10, torch.float64) == 80
