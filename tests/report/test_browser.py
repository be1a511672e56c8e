"""The page in a browser, from a file: clicks, keys, schemes, paper, hostile text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import axe_playwright_python
import pytest

from tests.report import samples

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
SCHEMES = [("light", 1280), ("dark", 390)]


def contrast_of_ink(shown):
    """Lightness of the page's paper and of its ink, 0 to 255."""
    style = "(name) => getComputedStyle(document.body)[name]"
    values = [shown.page.evaluate(style, name) for name in ("backgroundColor", "color")]
    return [sum(map(float, re.findall(r"[\d.]+", value)[:3])) / 3 for value in values]


def pixels(shown, selector):
    """The colours that a canvas is drawn in, seldom ones left out."""
    script = """canvas => {
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const seen = new Map();
      for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] < 255) continue;
        const key = `${data[at]},${data[at + 1]},${data[at + 2]}`;
        seen.set(key, (seen.get(key) || 0) + 1);
      }
      return [...seen].filter(([, count]) => count > 50).map(([key]) => key);
    }"""
    return set(shown.page.locator(f"{selector} canvas").evaluate(script))


def bars(page):
    """Where the bars of the weight chart are, on the screen."""
    over = page.locator("#weights-chart .u-over")
    over.scroll_into_view_if_needed()
    return over.bounding_box()


@pytest.mark.parametrize("name", samples.ALL)
@pytest.mark.parametrize(("scheme", "width"), SCHEMES)
def test_it_asks_for_nothing_complains_of_nothing_and_fits(show, name, scheme, width):
    shown = show(name, scheme=scheme, width=width)
    shown.page.mouse.wheel(0, 4000)
    assert shown.requests == [shown.file.as_uri()]
    assert shown.complaints == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    paper, ink = contrast_of_ink(shown)
    assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("tutorial", "light"), ("undivided", "dark"), ("killed", "dark"), ("hostile", "light"),
     ("large", "light"), ("nothing", "light")],
)  # fmt: skip
def test_it_is_accessible(show, name, scheme):
    shown = show(name, scheme=scheme)
    shown.page.evaluate(AXE)
    found = shown.page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', "
        "'best-practice']})"
    )
    said = [
        (item["id"], [node["target"] for node in item["nodes"]]) for item in found["violations"]
    ]
    assert said == []
    assert len(found["passes"]) > 20


def test_the_audit_can_fail(show):
    shown = show("tutorial")
    shown.page.evaluate("document.querySelector('#window').previousElementSibling.remove()")
    shown.page.evaluate("document.querySelector('label[for=window]')?.remove()")
    shown.page.evaluate(AXE)
    found = shown.page.evaluate("axe.run(document)")
    assert "select-name" in {item["id"] for item in found["violations"]}


def test_the_verdict_is_seen_without_scrolling(show):
    for width in (1280, 390):
        shown = show("undivided", width=width)
        box = shown.page.get_by_role("heading", level=1).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 500


def test_a_click_on_a_bar_shows_its_window(show):
    shown = show("undivided")
    page = shown.page
    assert page.locator("#window option:checked").inner_text().startswith("update 0")
    over = bars(page)
    page.mouse.move(over["x"] + over["width"] * 0.99, over["y"] + over["height"] / 2)
    tip = page.locator("#weights-chart .tip")
    assert "lost: no step used its gradient" in tip.inner_text()
    assert "loss: 1, expected 0.5" in tip.inner_text()
    page.mouse.click(over["x"] + over["width"] * 0.99, over["y"] + over["height"] / 2)
    assert (
        page.locator("#window option:checked").inner_text()
        == "window 6, no step: 2 micro-batches, lost"
    )
    assert page.locator("#micros tbody tr").count() == 2
    assert page.locator("#micros .bad").first.inner_text() == "1, lost"


def test_the_window_is_picked_by_list_and_by_buttons(show):
    page = show("killed").page
    assert page.locator("#window option:checked").inner_text().endswith("some unknown")
    page.get_by_label("Window", exact=True).select_option(index=0)
    assert page.get_by_role("button", name="Previous window").is_disabled()
    page.get_by_role("button", name="Next window").click()
    assert "update 1" in page.locator("#micros caption").inner_text()
    assert page.locator("#micros tbody tr").count() == 8


def test_the_timeline_has_a_row_for_each_line_and_a_block_for_each_event(show):
    page = show("undivided").page
    window = samples.undivided().windows[0]
    rows = page.locator(".lane-name").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["9", "11", "13", "14", "15", "16"]
    assert page.locator(".block").count() == len(window.events)
    assert page.locator(".block.backward").count() == 4
    assert page.locator(".part").all_inner_texts()[-1] == "update"
    backward = page.locator(".block.backward").first
    backward.click()
    said = page.locator("#detail").inner_text()
    assert said.startswith("2 of 12: backward at train.py:11 (loss)")
    assert said.endswith("loss.backward()")


def test_blocks_are_of_one_width_or_to_scale(show):
    page = show("undivided").page
    events = samples.undivided().windows[0].events

    def widths():
        return [
            box["width"] for box in (one.bounding_box() for one in page.locator(".block").all())
        ]

    assert max(widths()) - min(widths()) < 1
    page.get_by_role("radio", name="time").check()
    seen, real = widths(), [event.end - event.start for event in events]
    assert seen[1] / seen[0] == pytest.approx(real[1] / real[0], rel=0.05)


def test_the_timeline_by_keyboard(show):
    page = show("undivided").page
    page.locator(".block").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#detail").inner_text().startswith("2 of 12")
    page.keyboard.press("End")
    assert page.locator("#detail").inner_text().startswith("12 of 12")
    page.keyboard.press("Home")
    assert page.locator("#detail").inner_text().startswith("1 of 12")
    assert page.locator(".block[tabindex='0']").count() == 1


def test_every_control_is_reached_by_tab(show):
    page = show("killed").page
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(document.activeElement.id || document.activeElement.className)"))
    assert {"skip", "theme", "term", "window", "window-on"} <= seen
    assert any("block" in name for name in seen)


def test_the_skip_link_and_the_sections(show):
    page = show("undivided").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.get_by_role("link", name="Parameters").click()
    assert page.locator("#parameters-title").is_visible()
    assert page.evaluate("location.hash") == "#parameters"


def test_terms_are_picked(show):
    page = show("killed").page
    label = page.locator("#weights-chart").get_attribute("aria-label")
    assert "69 as it should be, 3 could not be told" in label
    page.get_by_label("Loss term").select_option("auxiliary")
    over = bars(page)
    page.mouse.move(over["x"] + over["width"] * 0.3, over["y"] + 40)
    assert (
        "unknown: the loss went through a custom function"
        in page.locator("#weights-chart .tip").inner_text()
    )


def test_tables_sort_and_filter(show):
    page = show("large").page
    names = page.locator("#parameter-table tbody tr:visible th")
    assert page.locator("#filter-count").inner_text() == "300 of 300"
    page.get_by_label("Filter").fill("blocks.14")
    assert page.locator("#filter-count").inner_text() == "18 of 300"
    page.get_by_label("Filter").fill("")
    page.get_by_label("only what no optimizer owns").check()
    assert names.count() == 4
    head = page.locator("#parameter-table th", has_text="By, of its norm")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    column = page.locator("#parameter-table tbody tr:visible td:last-child")
    up = [float(text) for text in column.all_inner_texts()]
    head.get_by_role("button").click()
    down = [float(text) for text in column.all_inner_texts()]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"


def test_the_theme_is_switched_and_the_plots_follow(show):
    shown = show("undivided")
    light = pixels(shown, "#weights-chart")
    button = shown.page.locator("#theme")
    button.click()
    button.click()
    assert button.inner_text() == "Theme: dark"
    assert contrast_of_ink(shown)[0] < 60
    dark = pixels(shown, "#weights-chart")
    assert dark
    assert not dark & light
    shown.page.emulate_media(color_scheme="dark")
    button.click()
    assert pixels(shown, "#weights-chart") == dark


def test_on_paper_it_is_light_and_nothing_is_cut(show, tmp_path):
    shown = show("undivided", scheme="dark")
    dark = pixels(shown, "#weights-chart")
    file = tmp_path / "report.pdf"
    shown.page.evaluate("""addEventListener('beforeprint', () => queueMicrotask(() => {
      window.widths = [...document.querySelectorAll('.uplot')].map((plot) => plot.offsetWidth);
      window.paper = getComputedStyle(document.documentElement).colorScheme;
    }))""")
    shown.page.pdf(path=file, format="A4", margin=dict.fromkeys(("left", "right"), "15mm"))
    assert file.read_bytes().startswith(b"%PDF")
    assert shown.page.evaluate("window.paper") == "light"
    # A4 less the margins, in CSS pixels
    assert max(shown.page.evaluate("window.widths")) < (210 - 30) / 25.4 * 96
    assert pixels(shown, "#weights-chart") == dark


def test_without_scripts_the_findings_stand(show):
    page = show("undivided", java_script_enabled=False).page
    assert page.get_by_role("heading", level=1).inner_text() == samples.undivided().verdict
    assert page.locator(".finding").count() == 2
    assert page.locator(".marked code").first.inner_text().strip().startswith("loss = criterion")
    assert page.locator("#parameters tbody tr").count() == 5
    assert "switched off" in page.locator("noscript").inner_text()
    assert not page.locator("#weights").is_visible()


def test_hostile_text_is_shown_and_runs_nothing(show):
    shown = show("hostile")
    page = shown.page
    for button in page.get_by_role("button").all():
        if button.is_visible() and button.is_enabled():
            button.click()
    for summary in page.locator("summary").all():
        summary.click()
    over = bars(page)
    page.mouse.click(over["x"] + 60, over["y"] + 60)
    assert shown.complaints == []
    assert shown.requests == [shown.file.as_uri()]
    assert page.locator("img").count() == 0
    said = page.get_by_role("heading", level=1).inner_text()
    assert said.startswith("</script><img src=x onerror=alert(1)>")
    assert "{{7*7}}<U+202E>gnp.exe" in said
    assert "</script>" in page.locator("#weights-chart .tip").inner_text()
    assert "</script>" in page.locator("#term option").first.inner_text()


def test_a_script_that_slipped_in_would_not_run(show):
    shown = show("clean")
    text = shown.file.read_text(encoding="utf-8")
    shown.file.write_text(text.replace("<main", "<script>window.broken = 1</script><main"))
    shown.page.goto(shown.file.as_uri())
    assert shown.page.evaluate("window.broken") is None
    assert any("Content Security Policy" in said for said in shown.complaints)


def test_plots_are_described_and_drawn(show):
    shown = show("clean")
    labels = [item.get_attribute("aria-label") for item in shown.page.locator("[role=img]").all()]
    assert len(labels) == 6
    assert all(labels)
    assert labels[0].startswith("Weights of 96 micro-batches in 24 windows: 96 as it should be.")
    assert all(len(pixels(shown, f".uplot >> nth={place} >> .u-wrap")) > 1 for place in range(6))


def test_what_was_not_measured_is_said(show):
    made = samples.undivided()
    windows = tuple(replace(window, change=None) for window in made.windows)
    page = show(replace(made, windows=windows, memory=())).page
    said = page.locator("#not-measured").inner_text()
    assert said == "Not measured in this run: change of the parameters, memory."
    assert not page.locator("#change").is_visible()
    assert page.locator("#norm").is_visible()


def test_each_optimizer_has_a_line_of_its_own(show):
    shown = show("large")
    legend = shown.page.locator("#norm .legend span").all_inner_texts()
    assert legend == ["AdamW 0", "SGD 1"]
    assert shown.page.locator("#change .legend span").count() == 2
    first, second = "45,91,147", "240,163,92"  # --note and --backward of the light scheme
    assert {first, second} <= pixels(shown, "#norm")
    assert second not in pixels(show("clean"), "#norm")


def test_the_term_that_is_wrong_is_shown_first(show):
    made = samples.killed()
    windows = []
    for window in made.windows:
        micros = [
            replace(micro, terms=(micro.terms[0], replace(micro.terms[1], weight=1.0)))
            for micro in window.microbatches
        ]
        windows.append(replace(window, microbatches=tuple(micros)))
    page = show(replace(made, windows=tuple(windows))).page
    assert page.locator("#term option:checked").inner_text() == "auxiliary"


def test_nothing_grows_in_windows_of_one(show):
    page = show("tutorial").page
    assert (
        "Every window has one micro-batch: nothing grows." in page.locator("#growth").inner_text()
    )
    assert json.loads(page.locator("#figures").text_content())["left"]["windows"] == 0
