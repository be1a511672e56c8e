"""The page as text: complete, small, and closed to whatever a run's texts hold."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gradaccum.records import Evidence
from gradaccum.records.diagnosis import Event, TermSeen
from gradaccum.report.excerpts import excerpt, shorten
from gradaccum.report.page import html
from gradaccum.report.seen import happened, updates
from gradaccum.report.weights import named, state
from tests.report import samples

LIMIT = 1_500_000
VOID = {"meta", "link", "br", "img", "input", "hr", "path", "circle"}


class Parsed(HTMLParser):
    """The elements of a page, and whether each was closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def inside(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(params=samples.ALL)
def page(request):
    return html(samples.ALL[request.param]())


def test_it_is_well_formed_and_asks_no_host_for_anything(page):
    parsed = Parsed(page)
    assert parsed.open == []
    for tag, attrs in parsed.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")]
        assert "style" not in attrs  # the policy would forbid it
    assert "@import" not in page
    assert not re.search(r"url\((?!data:)", page)


def test_links_lead_somewhere_and_ids_are_unique(page):
    parsed = Parsed(page)
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for name in ("href", "aria-labelledby", "for"):
        for _, attrs in parsed.elements:
            if attrs.get(name, "").startswith("#") or (name != "href" and name in attrs):
                assert attrs[name].lstrip("#") in ids


def test_the_policy_names_the_style_and_the_script_and_nothing_else(page):
    policy = next(
        attrs["content"] for attrs in Parsed(page).inside("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )  # fmt: skip
    style = re.search(r"<style>(.*?)</style>", page, re.S).group(1)
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(script) == 1
    for kind, text in (("style", style), ("script", script[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_figures_are_strict_json(page):
    def refuse(word):
        raise AssertionError(word)

    block = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    table = json.loads(block.group(1), parse_constant=refuse)
    assert set(table) >= {"kinds", "places", "windows", "memory", "left"}


def test_hostile_text_is_text():
    text = html(samples.hostile())
    ours = {tag for tag, _ in Parsed(html(samples.undivided())).elements}
    theirs = {tag for tag, _ in Parsed(text).elements}
    assert theirs <= ours
    assert "img" not in theirs
    assert "<!--" not in text.replace("&lt;!--", "")
    assert "49" not in re.search(r"<h1.*?</h1>", text, re.S).group(0)
    hidden = [char for char in text if not char.isprintable() and char not in "\n\t"]
    assert hidden == []
    text.encode("utf-8")


def test_the_verdict_comes_first():
    text = "".join(Parsed(html(samples.undivided())).texts)
    assert 0 < text.index(samples.undivided().verdict) < text.index("loss not divided")


@pytest.mark.parametrize(
    ("name", "state"),
    [("clean", "fine"), ("tutorial", "error"), ("killed", "stopped"), ("nothing", "unsure")],
)
def test_the_page_looks_as_the_verdict_is(name, state):
    assert f'<body class="{state}">' in html(samples.ALL[name]())


def monster():
    """Far more of everything than a page can hold, each text as long as it gets."""
    long = samples.HOSTILE * 40
    made = samples.undivided()
    window = made.windows[0]
    micro = replace(
        window.microbatches[0],
        terms=tuple(TermSeen(f"{long}{i}", None, 0.1, 3, f"{i}{long}") for i in range(6)),
    )
    events = tuple(Event(f"kind {i % 40}", f"{i}{long}", i, i, i + 1.0, long) for i in range(500))
    windows = tuple(
        replace(window, index=i, microbatches=(micro,) * 20, events=events[: 10 * (i + 1)])
        for i in range(420)
    )
    finding = replace(
        made.findings[0], message=long, mend=long,
        evidence=tuple(Evidence("train.py", i, long) for i in range(1, 400)),
    )  # fmt: skip
    return replace(
        made,
        verdict=long,
        findings=tuple(replace(finding, line=i + 1) for i in range(900)),
        windows=windows,
        parameters=samples.parameters(2000),
        optimizers=made.optimizers * 3000,
        sources={"train.py": dict.fromkeys(range(1, 3000), long)},
        memory=tuple((float(i), i) for i in range(20_000)),
        totals={f"{i}{long}": i for i in range(500)},
        run=replace(made.run, argv=(long,) * 5000, error=long),
    )


@pytest.fixture(scope="module")
def big():
    return html(monster())


def test_a_page_of_any_run_is_small(big):
    assert len(html(samples.large()).encode()) < LIMIT
    assert len(big.encode()) < LIMIT
    assert Parsed(big).open == []


def test_what_is_left_out_is_said(big):
    text = "".join(Parsed(big).texts)
    assert "more findings" in text
    assert "3,500 more stand in the JSON report only" in text
    table = json.loads(re.search(r'id="figures">(.*?)</script>', big, re.S).group(1))
    assert table["left"]["windows"] > 0
    assert table["left"]["events"] > 0
    assert table["left"]["microbatches"] > 0


def test_a_window_is_whole_or_left_out():
    made = samples.large()
    table = json.loads(re.search(r'id="figures">(.*?)</script>', html(made), re.S).group(1))
    for window, packed in zip(made.windows, table["windows"], strict=True):
        assert len(packed["micros"]) in (0, len(window.microbatches))
        assert packed["events"] is None or len(packed["events"]) == len(window.events)


def test_weights_that_differ_by_rounding_are_right_and_others_are_off():
    micro = samples.clean().windows[0].microbatches[0]
    third = 0.3333333432674408  # a float32's
    assert state(TermSeen("a", third, 1 / 3), micro) == "right"
    assert state(TermSeen("a", 1 / 3 * 1.001, 1 / 3), micro) == "off"
    assert state(TermSeen("a", 0.0, 1e-9), micro) == "off"
    assert state(TermSeen("a", None, 1 / 3), micro) == "unknown"
    assert state(TermSeen("a", 1.0, None), micro) == "unknown"
    assert state(TermSeen("a", 1 / 3, 1 / 3), replace(micro, lost=True)) == "lost"


def test_terms_of_one_name_are_told_apart():
    made = samples.clean().windows[0].microbatches[0]
    twice = replace(made, terms=made.terms * 3)
    assert [name for name, _ in named(twice)] == ["loss", "loss 2", "loss 3"]


def test_a_run_without_totals_is_counted_by_what_was_seen():
    made = replace(samples.clean(), totals={"backward": 7})
    assert happened(made, "backward") == 96
    assert happened(samples.large(), "backward") == 75200
    assert updates(made) == 24


def test_only_the_last_window_is_said_to_have_no_step():
    made = samples.undivided()
    cut = replace(made, windows=(made.windows[-1], *made.windows))
    table = json.loads(re.search(r'id="figures">(.*?)</script>', html(cut), re.S).group(1))
    names = [window["name"] for window in table["windows"]]
    assert names[0] == "window 6, seen in part"
    assert names[1:3] == ["update 0", "update 1"]
    assert names[-1] == "window 6, no step"


def test_an_excerpt_marks_its_line_and_notes_its_evidence():
    made = samples.undivided()
    (part,), rest = excerpt(made.findings[0], made.sources)
    rows = [line for run in part.runs for line in run]
    assert [line.number for line in rows if line.marked] == [10]
    assert {line.number: line.notes for line in rows if line.notes} == {
        11: ("96 backward passes, weight 1 each",),
        14: ("24 steps, each after 4 backward passes",),
    }
    assert rest == ()


def test_evidence_without_source_is_kept():
    made = samples.undivided()
    parts, rest = excerpt(made.findings[0], {})
    assert parts == ()
    assert rest == made.findings[0].evidence
    text = "".join(Parsed(html(replace(made, sources={}))).texts)
    assert "96 backward passes, weight 1 each" in text


def test_a_string_over_several_lines_is_one_string():
    made = samples.undivided()
    source = {9: 'text = """', 10: "for", 11: '"""'}
    (part,), _ = excerpt(made.findings[0], {"train.py": source})
    assert str(part.runs[0][1].code) == '<span class="s">for</span>'


def test_paths_are_shown_below_the_folder_that_they_share():
    assert shorten(["/a/b/train.py", "/a/b/lib/x.py", "/v/site-packages/torch/y.py", "rel.py"]) == {
        "/a/b/train.py": "train.py",
        "/a/b/lib/x.py": "lib/x.py",
        "/v/site-packages/torch/y.py": "torch/y.py",
        "rel.py": "rel.py",
    }
    assert shorten(["/a/x.py", "/b/y.py"]) == {"/a/x.py": "/a/x.py", "/b/y.py": "/b/y.py"}
