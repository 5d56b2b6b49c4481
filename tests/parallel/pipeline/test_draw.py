"""Pictures say what the Timeline says: every action once, in its place, in text, SVG and trace."""

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import published

from megalite.parallel.pipeline import Costs, Timeline, check, one_f_one_b, schedule_of, simulate, zb_h2, zb_v
from megalite.parallel.pipeline.draw import (
    AROUND,
    COLOURS,
    account,
    colour,
    comparison,
    ink,
    table,
    text,
    texts,
    trace,
    unit_of,
)
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


def with_surroundings(schedule=None, costs=EQUAL):
    made = simulate(schedule or one_f_one_b(2, 2), costs)
    return Timeline(made.schedule, made.ranks, made.start - 1.0, made.end + 2.0)


def test_data_and_optimizer_are_drawn_and_accounted_for():
    timeline = with_surroundings()
    bubble = timeline.bubble()
    rows = text(timeline, colours=False).plain.splitlines()
    assert [row[:10] for row in rows[:2]] == ["rank 0 │..", "rank 1 │.."]
    assert all(row.endswith("====") for row in rows[:2]) and rows[2].endswith(". data   = optimizer   ")
    assert account(bubble).endswith("% over ideal time; of the whole step data 8.3%, optimizer 16.7%")
    assert "of the whole step data 8.3%" in str(table(bubble, [2, 1]).caption)
    events = [event for event in json.loads(trace(timeline))["traceEvents"] if event["ph"] == "X"]
    for name, start, length in (("data", 0, 1e6), ("optimizer", 10e6, 2e6)):
        found = [event for event in events if event["name"] == name]
        assert [(event["tid"], event["ts"], event["dur"]) for event in found] == [
            (0, start, length),
            (1, start, length),
        ]
    _, rects, texts = cells(svg([timeline], unit="s"))
    for colour_of, wide in ((AROUND["data"], 1), (AROUND["optimizer"], 2)):
        tall = [rect for rect in rects if rect.get("fill") == "#{:02x}{:02x}{:02x}".format(*colour_of)]
        assert [float(rect.get("height")) for rect in tall] == [80, 16]  # over both ranks, and in the legend
        assert float(tall[0].get("width")) == pytest.approx(56 * wide - 1.2, abs=0.01)
    assert {"data", "optimizer", "12 s"} <= set(texts)


def test_pictures_one_under_the_other_have_one_scale():
    fast, slow = (simulate(one_f_one_b(2, 3), Costs(t, t, t)) for t in (1.0, 2.0))
    lines = texts([fast, slow], ["fast", "slow"], 60, colours=False).plain.splitlines()
    assert [lines[0], lines[3]] == ["fast", "slow"] and len(lines) == 7
    lengths = [len(line) - len("rank 0 │") for line in (lines[1], lines[4])]
    assert lengths[1] == 2 * lengths[0] <= 52


@settings(deadline=None)
@given(published(), st.integers(30, 200), st.booleans(), st.randoms(use_true_random=False))
def test_pictures_of_jittery_steps_keep_to_their_width(schedule, width, colours, random):
    steps = [with_surroundings(schedule, Costs(*(random.uniform(0.01, 1) for _ in range(5)))) for _ in range(2)]
    lines = texts(steps, ["", "measured"], width, colours).plain.splitlines()
    assert max(len(line) for line in lines[:-1]) <= max(width, len("measured"))
    assert "measured" in lines


def test_the_comparison_has_a_column_for_each_and_a_row_for_each_cause():
    simulated, measured = with_surroundings().bubble(), with_surroundings(costs=Costs(1, 1, 1, 0.5)).bubble()
    made = comparison({"over_total": 1 / 3, "over_ideal": 0.5}, simulated, measured)
    rows = list(zip(*(list(column.cells) for column in made.columns), strict=True))
    assert [str(column.header) for column in made.columns] == ["", "formula", "simulation", "measurement"]
    assert rows[0] == ("bubble of total time", "33.3%", "33.3%", f"{measured.over_total:.1%}")
    assert ("  communication", "", "0.0%", f"{measured.causes['communication']:.1%}") in rows
    assert ("pipeline, s", "", "9", "10") in rows and ("whole step, s", "", "12", "13") in rows
    alone = comparison({}, simulate(one_f_one_b(2, 2), EQUAL).bubble(), simulate(one_f_one_b(2, 2), EQUAL).bubble())
    assert len(alone.columns) == 3 and alone.row_count == 8


def test_a_trace_of_two_has_a_process_for_each():
    made = simulate(one_f_one_b(2, 2), EQUAL)
    events = json.loads(trace(made, made, titles=["simulated", "measured"]))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "simulated", 1: "measured"}
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert len(ids) == len(set(ids)) == 8
    assert sum(event["ph"] == "X" for event in events) == 16


@pytest.mark.parametrize(
    ("seconds", "unit"), [(3.0, (1.0, "s")), (0.25, (1e3, "ms")), (2e-5, (1e6, "µs")), (0.0, (1e6, "µs"))]
)
def test_units(seconds, unit):
    assert unit_of(seconds) == unit


@settings(deadline=None)
@given(published(), st.randoms(use_true_random=False))
def test_nothing_of_a_picture_is_outside_it(schedule, random):
    steps = [with_surroundings(schedule, Costs(*(random.uniform(0.01, 1) for _ in range(5)))) for _ in range(2)]
    document = svg(steps, ["simulated", "measured"], "s", "a remark")
    root, rects, texts = cells(document)
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in rects:
        assert float(rect.get("x") or 0) + float(rect.get("width")) <= width
        assert float(rect.get("y") or 0) + float(rect.get("height")) <= height
    for node in root.findall("{http://www.w3.org/2000/svg}text"):
        if node.get("text-anchor") == "start":  # of a font of middling width
            assert float(node.get("x")) + 0.55 * float(node.get("font-size")) * len(node.text) <= width
        assert float(node.get("y")) <= height
    assert "a remark" in texts


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
