"""What a report says in numbers: counted, weighed and spelled as they are."""

import pytest
from loops import TRAINED
from runs import diagnose

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CLIPPED = """
for i, (x, y) in enumerate(data[:6]):
    (F.cross_entropy(model(x), y) / 3).backward()
    nn.utils.{clip}
    if (i + 1) % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "clip",
    [
        "clip_grad_norm_(model.parameters(), 0.1)",
        "clip_grad_value_(model.parameters(), 0.1)",
        "clip_grads_with_norm_(model.parameters(), 0.1, torch.ones(()))",
    ],
)
def test_one_clip_is_one(clip, tmp_path):
    """`clip_grad_norm_` calls `clip_grads_with_norm_`."""
    (found,) = diagnose(TRAINED + CLIPPED.format(clip=clip), tmp_path).findings
    assert found.code == "GA401"
    assert "the clip runs 3 times in an update of 3 micro-batches" in found.message


def test_the_weights_of_short_windows_are_among_those_that_are_told(tmp_path):
    loop = """
for start in range(0, 4, 3):
    window = data[start : start + 3][: 4 - start]
    for x, y in window:
        (F.cross_entropy(model(x), y) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    seen = diagnose(TRAINED + loop, tmp_path)
    assert seen.findings == ()
    assert "2 updates of 1 to 3 micro-batches; each micro-batch weighed 0.333 to 1" in seen.verdict


def test_a_tail_that_is_lost_should_have_been_an_update(tmp_path):
    loop = """
for epoch in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(data[:4]):
        (F.cross_entropy(model(x), y) / 3).backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
    seen = diagnose(TRAINED + loop, tmp_path)
    (found,) = seen.findings
    assert "1 micro-batch of the last, short window is computed" in found.message
    told = [
        (micro.lost, round(micro.terms[0].expected, 6))
        for window in seen.windows
        for micro in window.microbatches
    ]
    third = round(1 / 3, 6)
    full = [(False, third)] * 3
    assert told == [*full, (True, 1.0), *full, (True, 1.0)]


def test_losses_that_are_differentiated_again_are_weighed_together(tmp_path):
    """By a multiplier on each loss: 3, 2 and 1 thirds."""
    loop = """
total = 0
for i, (x, y) in enumerate(data[:6]):
    total = total + F.cross_entropy(model(x), y) / 3
    total.backward(retain_graph=True)
    if (i + 1) % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
        total = 0
"""
    (found,) = diagnose(TRAINED + loop, tmp_path).findings
    assert found.code == "GA502"
    assert "they weigh 1, 0.667, 0.333" in found.message


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path):
    loop = (
        "for x, y in data[:2]:\n    F.cross_entropy(model(x), y).backward()  # caf\u00e9 \u00e0 6\n"
    )
    (tmp_path / "loop.py").write_text(f"# coding: latin-1\n{TRAINED}{loop}", encoding="latin-1")
    text = "import sys; sys.path.insert(0, __file__[:-8]); import loop\n"
    lines = diagnose(text, tmp_path).sources[str(tmp_path / "loop.py")]
    assert any("caf\u00e9 \u00e0 6" in line for line in lines.values())
