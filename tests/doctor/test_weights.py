"""What a short window's weights should have been, and which gradients were lost."""

import pytest
from loops import DATA
from runs import diagnose

from gradaccum.doctor.watch import watch

LOOP = (
    DATA
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(data[:{length}]):
    out = model(x)
    loss = {loss}
    loss.backward()
    if (i + 1) % 4 == 0{last}:
        optimizer.step()
        optimizer.zero_grad()
"""
)
DIVIDED = "F.cross_entropy(out, y) / 4"
STEP = LOOP[: LOOP.index("optimizer.step()")].count("\n") + 1


def run(folder, length=7, loss=DIVIDED, last=" or i == 6"):
    return diagnose(LOOP.format(length=length, loss=loss, last=last), folder)


def test_a_tail_divided_by_the_full_window_shows_what_it_should_have_weighed(tmp_path):
    seen = run(tmp_path)
    assert [(one.code, one.severity, one.line) for one in seen.findings] == [
        ("GA204", "warning", STEP)
    ]
    full, tail = (window.microbatches for window in seen.windows[:2])
    assert [micro.terms[0].expected for micro in full] == [0.25] * 4
    assert [micro.terms[0].weight for micro in tail] == [0.25] * 3
    assert [micro.terms[0].expected for micro in tail] == [pytest.approx(1 / 3, rel=1e-15)] * 3
    [item] = seen.findings[0].evidence
    assert "an update of 3 weighs 0.25 and should weigh 1/3" in item.what
    assert seen.verdict.startswith("1 warning; first the tail is divided by the full window")


def test_a_coefficient_is_scaled_with_its_tail(tmp_path):
    loss = "(F.cross_entropy(out, y) + 0.01 * out.pow(2).mean()) / 4"
    seen = run(tmp_path, loss=loss)
    assert [(one.code, one.line) for one in seen.findings] == [("GA204", STEP)]
    assert "divided by 4" in seen.findings[0].message
    expected = sorted(term.expected for term in seen.windows[1].microbatches[0].terms)
    assert expected == pytest.approx([0.01 / 3, 1 / 3], rel=2**-23)


@pytest.mark.parametrize("loss", ["0.25 * F.cross_entropy(out, y)", "0.5 * out.pow(2).mean()"])
def test_a_coefficient_is_not_called_a_division(loss, tmp_path):
    assert not any("divided by" in one.message for one in run(tmp_path, loss=loss).findings)


def test_a_term_beside_a_division_is_not_called_divided_by_its_coefficient(tmp_path):
    loss = "F.cross_entropy(out, y) / 4 + 0.01 * out.pow(2).mean()"
    seen = run(tmp_path, length=8, loss=loss, last="")
    [one] = seen.findings
    assert (one.code, one.severity) == ("GA201", "warning")
    assert "`pow` weighs 0.01 in each and 0.04 in all" in one.message
    for window in seen.windows[:2]:
        for micro in window.microbatches:
            weights = {term.name: term.expected for term in micro.terms}
            assert weights == {"nll_loss": 0.25, "pow": pytest.approx(0.0025, rel=2**-23)}


def test_what_a_finished_run_leaves_unused_is_lost(tmp_path):
    seen = run(tmp_path, length=6, last="")
    assert [one.code for one in seen.findings] == ["GA302"]
    lost = [[micro.lost for micro in window.microbatches] for window in seen.windows]
    assert lost == [[False] * 4, [True] * 2]


def test_what_a_run_that_raised_leaves_unused_is_not(tmp_path):
    text = LOOP.format(length=6, loss=DIVIDED, last="") + "raise SystemError\n"
    with pytest.raises(SystemError), watch() as watched:
        exec(compile(text, str(tmp_path / "train.py"), "exec"), {})
    seen = watched.diagnosis
    assert sum(len(window.microbatches) for window in seen.windows) == 6
    assert not any(micro.lost for window in seen.windows for micro in window.microbatches)
