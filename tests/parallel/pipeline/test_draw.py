"""Pictures say what the Timeline says: every action once, in its place, in text, SVG and trace."""

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import published

from megalite.parallel.pipeline import Costs, check, one_f_one_b, schedule_of, simulate, zb_h2, zb_v
from megalite.parallel.pipeline.draw import COLOURS, account, colour, ink, table, text, trace
from megalite.parallel.pipeline.svg import svg

EQUAL = Costs(1.0, 1.0, 1.0)
FAMILIAR = """\
rank 0 │F0F1F2        BW0-F3BW1-F4BW2-  BW3-  BW4-
rank 1 │  F0F1    BW0-F2BW1-F3BW2-F4BW3-  BW4-
rank 2 │    F0BW0-F1BW1-F2BW2-F3BW3-F4BW4-
        F forward   BW backward   """


def test_the_familiar_diagram():
    drawn = text(simulate(one_f_one_b(3, 5), EQUAL), colours=False).plain
    assert drawn == FAMILIAR


def test_in_colour_a_cell_has_its_microbatch_and_its_kind_has_a_colour():
    drawn = text(simulate(one_f_one_b(2, 2), EQUAL))
    assert drawn.plain.splitlines()[0] == "rank 0 │0 1      0     1  "
    styles = {str(span.style) for span in drawn.spans}
    for kind in ("F", "BW"):
        assert any("on rgb({},{},{})".format(*colour(kind)) in style for style in styles)


@settings(deadline=None)
@given(published(), st.integers(20, 200), st.booleans())
def test_text_keeps_to_its_width(schedule, width, colours):
    timeline = simulate(schedule, Costs(1, 1.5, 0.3, 0.1))
    lines = text(timeline, width, colours).plain.splitlines()
    assert len(lines) == len(schedule.ranks) + 1
    assert max(len(line) for line in lines[:-1]) <= width


def test_the_account_names_conventions_and_causes():
    assert account(simulate(one_f_one_b(4, 8), EQUAL).bubble()) == (
        "bubble 27.3% of total time (fill 13.6%, drain 13.6%), 37.5% over ideal time"
    )
    assert account(simulate(zb_v(4, 8), EQUAL).bubble()).endswith(", 0.0% without a barrier between steps")
    assert account(simulate(one_f_one_b(1, 8), EQUAL).bubble()) == "bubble 0.0% of total time, 0.0% over ideal time"


def test_the_table_has_a_row_for_each_rank():
    schedule = zb_h2(3, 6)
    assert table(simulate(schedule, EQUAL).bubble(), check(schedule)).row_count == 3


def test_ink_is_read_on_every_colour():
    def light(rgb):
        return sum(
            share * ((part / 255 + 0.055) / 1.055) ** 2.4
            for share, part in zip((0.2126, 0.7152, 0.0722), rgb, strict=True)
        )

    for kind in COLOURS:
        for chunk in range(4):
            background = colour(kind, chunk, 4)
            letters = [int(ink(background)[i : i + 2], 16) for i in (1, 3, 5)]
            dark, bright = sorted((light(background), light(letters)))
            assert (bright + 0.05) / (dark + 0.05) > 3.5, (kind, chunk)


def test_a_trace_has_every_action_and_an_arrow_for_every_message():
    schedule = zb_v(3, 4)
    timeline = simulate(schedule, Costs(0.002, 0.002, 0.001, 0.0005))
    events = json.loads(trace(timeline))["traceEvents"]
    spans = {(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    wanted = {(0, "0F0", 0.0, 2000.0), (1, "1F0", 2500.0, 2000.0)}
    assert wanted <= spans and len(spans) == sum(map(len, schedule.ranks))
    starts, ends = ([event for event in events if event["ph"] == kind] for kind in "sf")
    assert len(starts) == len(ends) == 2 * 4 * (schedule.stages - 2)  # the turn of the V is on one rank
    by_name = {event["id"]: event for event in starts}
    assert len(by_name) == len(starts)
    assert all(event["ts"] - by_name[event["id"]]["ts"] >= 499.9 for event in ends)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "rank 1", "rank 2"}


def cells(document):
    root = ElementTree.fromstring(document)
    name = "{http://www.w3.org/2000/svg}"
    return root, root.findall(f"{name}rect"), [node.text for node in root.findall(f"{name}text")]


def test_an_svg_has_a_cell_for_each_action_inside_its_frame():
    schedule = zb_v(3, 6)
    timeline = simulate(schedule, EQUAL)
    root, rects, texts = cells(svg([timeline]))
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(rects) == 1 + 3 + sum(map(len, schedule.ranks)) + 3 * 2 + 1  # page, rows, cells, legend
    for rect in rects:
        assert 0 <= float(rect.get("x") or 0) <= float(rect.get("x") or 0) + float(rect.get("width")) <= width + 0.01
        assert 0 <= float(rect.get("y") or 0) <= float(rect.get("y") or 0) + float(rect.get("height")) <= height
    assert texts[:2] == ["ZB-V: 3 ranks, 6 microbatches, 2 stages a rank", account(timeline.bubble())]
    assert texts.count("5") >= 3 * 2 * 3


def test_timelines_one_under_the_other_have_one_scale_and_their_titles():
    fast, slow = (simulate(one_f_one_b(2, 3), Costs(t, t, t)) for t in (1.0, 2.0))
    _, rects, texts = cells(svg([fast, slow], ["predicted", "measured <&>"]))
    assert {"predicted", "measured <&>"} <= set(texts)
    seconds = {
        round(float(rect.get("width")) / 10)
        for rect in rects
        if rect.get("fill") == "#2f6fce" and rect.get("height") == "38"
    }
    assert len(seconds) == 2  # one width for all of the fast, one for all of the slow


def test_numbers_that_do_not_fit_are_left_out():
    _, _, texts = cells(svg([simulate(one_f_one_b(8, 200), EQUAL)]))
    assert not [label for label in texts if re.fullmatch(r"1\d\d", label) and label not in ("100", "150")]


def test_nothing_to_draw():
    nothing = simulate(schedule_of(["0F0 0BW0"]), Costs(0, 0, 0))
    assert text(nothing).plain == "nothing to draw"
    with pytest.raises(ValueError, match="no time passes"):
        svg([nothing])
