"""Batches on their way: what travels when, and what waits for what."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from gradaccum.engine.memory.move import ahead


class Log:
    """A lane that notes what goes its way."""

    def __init__(self):
        self.events = []

    @contextmanager
    def beside(self):
        self.events.append("copy")
        yield

    def arrive(self, tensors):
        self.events.append(f"arrive {len(tensors)}")


def batches(log, n):
    for i in range(n):
        log.events.append(f"make {i}")
        yield {"x": torch.full((2,), float(i)), "y": (torch.zeros(1), "name")}


def test_one_is_on_its_way_while_another_computes_and_no_more():
    log = Log()
    for i, batch in enumerate(ahead(batches(log, 3), "meta", lane=log)):
        assert batch["x"].device.type == "meta"
        assert batch["y"][1] == "name"
        log.events.append(f"compute {i}")
    assert log.events == [
        "make 0",
        "copy",
        "arrive 2",
        "make 1",
        "copy",
        "compute 0",
        "arrive 2",
        "make 2",
        "copy",
        "compute 1",
        "arrive 2",
        "compute 2",
    ]


def test_nothing_is_copied_to_the_cpu_and_nothing_made_before_its_turn():
    made = []

    def batches():
        for i in range(3):
            made.append(i)
            yield torch.full((1,), float(i))

    for i, batch in enumerate(ahead(batches(), "cpu")):
        assert made == list(range(i + 1))
        assert float(batch) == i


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_computed_is_let_go(device):
    import weakref

    class Batch:
        pass

    held = []

    def batches():
        for _ in range(3):
            tensor = torch.zeros(4)
            held.append(weakref.ref(tensor))
            yield [tensor]

    lane = None if device == "cpu" else Log()
    for i, batch in enumerate(ahead(batches(), device, lane=lane)):
        del batch
        assert all(reference() is None for reference in held[:i])


def test_no_batches_and_batches_that_fail():
    assert list(ahead([], "meta", lane=Log())) == []

    def failing():
        yield torch.zeros(1)
        raise OSError("the disk is gone")

    found = ahead(failing(), "meta", lane=Log())
    with pytest.raises(OSError, match="the disk is gone"):
        list(found)


def test_packed_sequences_travel_too():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    (found,) = ahead([packed], "meta", lane=Log())
    assert found.data.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_arrive_whole_on_cuda():
    sources = [torch.full((1 << 20,), float(i)) for i in range(8)]
    sums = []
    for batch in ahead(iter(sources), "cuda"):
        torch.cuda._sleep(1_000_000)  # the next copy overtakes this computation
        sums.append(batch.sum())
    assert [float(s) for s in sums] == [float(i) * (1 << 20) for i in range(8)]
