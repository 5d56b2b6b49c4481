"""`megalite draw`: what it prints and writes, one line and 78 for a mistake, and no PyTorch."""

import json
import subprocess
import sys

import pytest

from megalite.launch.cli import main
from megalite.parallel.pipeline import Costs, one_f_one_b, simulate
from megalite.parallel.pipeline.measured import Recorder

SIZES = ["--stages", "4", "--microbatches", "8"]


def draw(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["draw", *map(str, arguments)])
    return exit.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_every_schedule_is_drawn(capsys, name):
    code, out, err = draw(capsys, name, *SIZES)
    assert (code, err) == (0, "")
    assert "rank 3 │" in out and "forward" in out and "of total time" in out and "in flight" in out


def test_the_bubble_of_1f1b_by_cause(capsys):
    _, out, _ = draw(capsys, "1f1b", *SIZES, "--send", 0.25)
    assert "27.3%" not in out and "communication" in out
    assert "bubble 27.3% of total time (fill 13.6%, drain 13.6%), 37.5% over ideal" in draw(capsys, "1f1b", *SIZES)[1]


def test_files_are_written(capsys, tmp_path):
    code, *_ = draw(capsys, "zb-h1", *SIZES, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_a_schedule_of_ones_own(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1\n")
    code, out, _ = draw(capsys, tmp_path / "mine.txt")
    assert code == 0 and "rank 1 │" in out


@pytest.fixture
def run_folder(tmp_path):
    """A run whose last stage is slower, measured on fewer cores than ranks."""
    schedule = one_f_one_b(4, 8)
    made = simulate(schedule, Costs(lambda stage: 5e-3 + 1e-3 * (stage == 3), 5e-3, 5e-3, 4e-4))
    recorder = Recorder(schedule, ranks=4, cores=2)
    recorder.add([[time for span in spans for time in span[1:]] for spans in made.ranks], -1e-3, made.end + 4e-3)
    recorder.save(tmp_path / "timeline.json")
    return tmp_path


def test_a_measured_step_stands_below_its_prediction(capsys, run_folder):
    svg, events = run_folder / "run.svg", run_folder / "run.trace"
    code, out, err = draw(capsys, run_folder, "--svg", svg, "--trace", events)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1F1B: 4 ranks, 8 microbatches, simulated from medians of one step"
    assert lines[5] == "measured: the step with the median bubble, of one step"
    assert lines[1:5] == lines[6:10]  # it was simulated
    assert all(word in out for word in ("formula", "simulation", "measurement", "27.3%", "imbalance", "optimizer, ms"))
    assert "4 ranks took turns on 2 cores" in out and "4 ranks took turns on 2 cores" in svg.read_text()
    assert len({event["pid"] for event in json.loads(events.read_text())["traceEvents"]}) == 2
    assert draw(capsys, run_folder / "timeline.json")[1] == out


def test_a_better_division_is_said(capsys, tmp_path):
    """Once each has cores of its own, and the stages' layers are in the file."""
    schedule = one_f_one_b(2, 8)
    made = simulate(schedule, Costs((2.0, 7.0), (2.0, 7.0), (2.0, 7.0)))
    times = [[time for span in spans for time in span[1:]] for spans in made.ranks]
    for layers, cores, division in (((1, 3), 2, "[2, 2]"), ((), 2, ""), ((1, 3), 1, ""), ((4, 7), 2, "[9, 2]")):
        recorder = Recorder(schedule, 2, cores, layers)
        recorder.add(times)
        recorder.save(tmp_path / "timeline.json")
        code, out, _ = draw(capsys, tmp_path)
        assert code == 0 and ("by the times measured" in out) == bool(division)
        assert f"by the times measured, mesh.division={division} would make the pipeline " in out or not division


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1f1b"], "1f1b: needs the numbers of stages and of microbatches"),
        (["1f1b", "--stages", "0", "--microbatches", "4"], "stages: 0 given; 1 or more would do"),
        (["zb-v", *SIZES, "--send", "-1"], "send of stage 0: -1 given; a time of 0 or more would do"),
        (["gpipe", *SIZES, "--chunks", "2"], "chunks: 2 given; only interleaved-1f1b has them"),
        (["no.csv"], "no.csv: no such schedule and no such file"),
        (["dead.txt"], "deadlock: rank 0 waits at 0BW0 for 1BW0 of rank 1, and rank 1 waits at 1F1 for 0F1 of rank 0"),
        (["1f1b", *SIZES, "--svg", "no/such/folder.svg"], "No such file or directory"),
        (["."], ".: no timeline.json in it; a run with mesh.pp > 1 writes one"),
        (["damaged.json"], "damaged.json: damaged or of another kind: "),
        (["damaged.json", "--stages", "4"], "--stages: 4 given; a run says its own"),
    ],
)
def test_a_mistake_is_a_line_and_78(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dead.txt").write_text("0F0 0BW0 0F1 0BW1\n1F0 1F1 1BW0 1BW1\n")
    (tmp_path / "damaged.json").write_text('{"format": ')
    code, out, err = draw(capsys, *arguments)
    assert (code, out) == (78, "")
    assert err.startswith("megalite: error: ") and says in err and err.count("\n") == 1


def test_drawing_imports_no_torch(run_folder):
    script = (
        "import sys\n"
        "from megalite.launch.cli import main\n"
        f"for drawn in (['zb-v', '--stages', '4', '--microbatches', '8'], [{str(run_folder)!r}]):\n"
        "    try:\n"
        "        main(['draw', *drawn])\n"
        "    except SystemExit as exit:\n"
        "        assert not exit.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr
