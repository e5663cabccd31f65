"""Shares cover every batch, messages go in the same order everywhere, and a lost partner is named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchcert.errors import InvalidInput, RunError
from patchcert.train.distributed import (
    ALONE,
    World,
    announced_world,
    joined_world,
    local_device,
    lost_processes_named,
)


@given(st.integers(0, 300), st.integers(1, 9))
def test_shares_cover_every_row_once_and_differ_by_at_most_one(count, size):
    rows = torch.arange(count)
    shares = [rows[World(rank, size).rows(count)] for rank in range(size)]
    assert torch.cat(shares).tolist() == rows.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sums_are_sent_in_the_order_of_their_kinds_and_come_back_in_place(monkeypatch):
    sent = []

    def double(joined):
        sent.append(joined.dtype)
        joined *= 2

    monkeypatch.setattr("torch.distributed.all_reduce", double)
    kinds = [torch.float64, torch.int32, torch.float32, torch.int64, torch.float16, torch.int16, torch.uint8]
    tensors = [torch.ones(2, 3, dtype=kind) for kind in (*kinds, *reversed(kinds))]
    World(0, 2).sum_in_place(tensors)
    assert sent == kinds
    assert all(torch.equal(tensor, torch.full_like(tensor, 2)) for tensor in tensors)


def test_one_process_sends_nothing(monkeypatch):
    monkeypatch.delattr("torch.distributed.all_reduce")
    ALONE.sum_in_place([torch.ones(1)])
    assert ALONE.agree(True, torch.device("cpu"))
    assert not ALONE.agree(False, torch.device("cpu"))


def test_the_world_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with joined_world(torch.device("cpu")) as world:
        assert world == ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert announced_world() == World(3, 4)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(InvalidInput, match="RANK='4' and WORLD_SIZE='4' do not describe"):
        announced_world()


def test_a_failed_message_says_what_it_means():
    with (
        pytest.raises(RunError, match=r"no longer answers \(Connection closed\)") as caught,
        lost_processes_named(),
    ):
        raise RuntimeError("Connection closed\nand more")
    assert "--resume" in caught.value.hint


def test_every_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device(torch.device("cuda")) == torch.device("cuda", 2)
    assert local_device(torch.device("cuda:1")) == torch.device("cuda", 1)
    assert local_device(torch.device("cpu")) == torch.device("cpu")
