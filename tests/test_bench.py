"""`bench`: real steps in processes of their own, kept in a file, compared and drawn."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from simpletuner_segckpt.bench import child, picture, tables
from simpletuner_segckpt.bench import prediction as predicting
from simpletuner_segckpt.bench import runner as running
from simpletuner_segckpt.bench.cells import (
    Cell,
    Point,
    front,
    points_of,
    slower_for_keeping,
    without_effect,
)
from simpletuner_segckpt.bench.trial import TINY_NOTE
from simpletuner_segckpt.commands import bench
from simpletuner_segckpt.costs.records import GIB

MODES = ["none", "interval2"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def command_line(folder: Path, *more: str) -> list[str]:
    config = folder / "config.json"
    if not config.exists():
        config.write_text('{"model_family": "sd3", "gradient_checkpointing_keep_last": 2}')
    out = str(folder / "out")
    return [str(config), "--tiny", "--steps", "2", "--warmup", "2", "--out", out, *more]


def lines(folder: Path) -> list[dict]:
    text = (folder / "out" / "results.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def child_of(pid: int) -> int | None:
    """The process that ``pid`` started, on Linux."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = path.read_text().split() if path.exists() else []
    return int(found[0]) if found else None


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A bench of three modes that was killed when the first was in the file."""
    folder = tmp_path_factory.mktemp("killed")
    argv = command_line(folder, "--modes", ",".join(MODES))
    parent = subprocess.Popen(
        [sys.executable, "-m", "simpletuner_segckpt.commands", "bench", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    file = folder / "out" / "results.jsonl"
    wait_for(lambda: file.exists() and file.read_text().count("\n") == 2)
    second = None
    if sys.platform == "linux":
        wait_for(lambda: child_of(parent.pid))
        second = child_of(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    return folder, second


@pytest.fixture(scope="module")
def resumed(killed):
    """The same command once more: the folder, what it printed, and its exit code."""
    folder, _ = killed
    argv = command_line(folder, "--modes", ",".join(MODES))
    again = subprocess.run(
        [sys.executable, "-m", "simpletuner_segckpt.commands", "bench", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, again


def test_a_child_ends_with_its_parent(killed):
    _, second = killed
    if second is None:
        pytest.skip("processes are looked up in /proc")
    wait_for(lambda: gone(second), 30)


def test_what_was_killed_goes_on_and_ends_with_table_and_picture(resumed):
    folder, again = resumed
    assert again.returncode == 0, again.stderr
    # Libraries that are imported may say something, too.
    told = [line for line in again.stderr.splitlines() if line.startswith(tuple(MODES))]
    assert told[0].startswith("none:")
    assert [line.endswith("(in the file already)") for line in told] == [True, False]
    header, *cells = lines(folder)
    assert header["identity"]["workload"]["family"] == "sd3"
    assert [cell["mode"] for cell in cells] == MODES
    for cell in cells:
        assert cell["status"] == "measured"
        assert len(cell["seconds"]) == 2
        assert min(cell["seconds"]) > 0
        assert cell["memory"] == "counted"
        assert cell["blocks"] == 5
    assert [cell["recomputed"] for cell in cells] == [0, 5]
    none, wide = (cell["peak_bytes"] for cell in cells)
    assert wide < none
    assert "segmented" in cells[1]["ran"]
    written = sorted(path.name for path in (folder / "out").iterdir())
    assert written == ["results.jsonl", "results.md", "results.png"]
    image = (folder / "out" / "results.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert image.rstrip().endswith(b"IEND\xaeB`\x82")


def test_the_tables(resumed):
    folder, again = resumed
    document = (folder / "out" / "results.md").read_text()
    assert "| Precision | Mode | CPU, 1 thread |\n| --- | --- | ---: |\n" in document
    assert "| fp32 | torch-ffn | not run |" in document
    [row] = [line for line in document.splitlines() if line.startswith("| fp32 | interval2 |")]
    seconds, gib = row.split("|")[3].split("/")
    assert float(seconds) > 0
    assert float(gib) > 0
    [row] = [line for line in document.splitlines() if line.startswith("| none |")]
    assert "| 1.00 | 1.00 | 0 of 5 |" in row
    assert "![memory against step time](results.png)" in document
    assert "mode" in again.stdout
    assert "note: not run: config, layer, interval4" in again.stdout


class Stub:
    """Measures nothing: a cell for each mode, with figures made up from its name."""

    def __init__(self, monkeypatch, stop_at: str = ""):
        self.asked: list[str] = []

        def measure(bench, mode):
            if mode == stop_at:
                raise KeyboardInterrupt
            self.asked.append(mode)
            number = len(mode)
            return Cell(
                mode=mode,
                keys=dict(bench.modes[mode]),
                status="measured",
                seconds=(number, number + 0.5),
                peak_bytes=(30 - number) << 30,
                memory="allocator",
                blocks=5,
            )

        monkeypatch.setattr(running.Bench, "measure", measure)


@pytest.fixture
def stub(monkeypatch):
    return Stub(monkeypatch)


def test_a_line_that_was_torn_is_measured_again(tmp_path, stub, capsys):
    argv = command_line(tmp_path, "--modes", "none,layer")
    assert bench.main(argv) == 0
    file = tmp_path / "out" / "results.jsonl"
    whole = file.read_bytes()
    for torn in (whole[:-30], whole[:-1], whole[:-30] + b"\n"):
        file.write_bytes(torn)
        stub.asked.clear()
        assert bench.main(argv) == 0
        assert stub.asked == ["layer"]
        assert file.read_bytes() == whole
    file.write_bytes(whole[:20])
    stub.asked.clear()
    assert bench.main(argv) == 0
    assert stub.asked == ["none", "layer"]
    file.write_bytes(whole[:-60] + b"\n" + whole)
    assert bench.main(argv) == 2
    assert "line 3: is not what bench writes" in capsys.readouterr().err


def test_results_of_something_else_are_not_mixed(tmp_path, stub, capsys):
    argv = command_line(tmp_path, "--modes", "none,config")
    assert bench.main(argv) == 0
    capsys.readouterr()
    assert bench.main([*argv, "--steps", "7"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith(
        "was measured with steps 2, now it is 7; pass --redo to measure again, or another --out"
    )
    assert bench.main([*argv, "--rank", "9"]) == 2
    assert "measured with workload.rank 4, now it is 9" in capsys.readouterr().err
    stub.asked.clear()
    config = tmp_path / "config.json"
    config.write_text('{"model_family": "sd3", "gradient_checkpointing_keep_last": 3}')
    assert bench.main(argv) == 0  # only what the config itself asks for has changed
    assert stub.asked == ["config"]
    stub.asked.clear()
    assert bench.main([*argv, "--steps", "7", "--redo"]) == 0
    assert stub.asked == ["config", "none"]
    assert lines(tmp_path)[0]["identity"]["steps"] == 7
    assert (tmp_path / "out" / "results.jsonl.old").exists()


def test_redo_measures_only_what_is_asked_for(tmp_path, stub):
    argv = command_line(tmp_path)
    assert bench.main([*argv, "--modes", "none,layer"]) == 0
    stub.asked.clear()
    assert bench.main([*argv, "--modes", "layer", "--redo"]) == 0
    assert stub.asked == ["layer"]
    assert "| none | 4.250 ± 0.125 |" in (tmp_path / "out" / "results.md").read_text()


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    stub = Stub(monkeypatch, stop_at="layer")
    argv = command_line(tmp_path, "--modes", "none,layer")
    assert bench.main(argv) == 130
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("interrupted: 1 of 2 modes are in ")
    assert err.endswith("the same command goes on with layer")
    assert [line["mode"] for line in lines(tmp_path)[1:]] == stub.asked == ["none"]


def test_without_matplotlib_there_is_a_plot_of_characters(tmp_path, stub, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench.main(command_line(tmp_path, "--modes", "none,layer")) == 0
    out = capsys.readouterr().out
    assert "A none" in out
    assert "pip install 'simpletuner-segckpt[plot]'" in out
    assert not (tmp_path / "out" / "results.png").exists()


RAISING = """
from diffusers import SD3Transformer2DModel

class Raises(SD3Transformer2DModel):
    def forward(self, *args, **kwargs):
        if self.gradient_checkpointing:
            raise ValueError("no checkpoints here\\nand more")
        return super().forward(*args, **kwargs)
"""


def test_a_mode_that_raises_is_failed_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    shipped = Path(__file__).parents[1] / "model_families" / "sd3.toml"
    text = shipped.read_text("utf-8").replace("diffusers.SD3Transformer2DModel", "raising.Raises")
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "sd3.toml").write_text(text, "utf-8")
    (tmp_path / "raising.py").write_text(RAISING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    argv = command_line(tmp_path, "--modes", "layer,none", "--families", str(tmp_path / "families"))
    assert bench.main(argv) == 0
    cells = {line["mode"]: line for line in lines(tmp_path)[1:]}
    assert cells["layer"]["status"] == "failed"
    assert cells["layer"]["reason"] == "ValueError: no checkpoints here"
    assert cells["none"]["status"] == "measured"
    assert "Traceback" in (tmp_path / "out" / "layer.log").read_text()
    assert not (tmp_path / "out" / "none.log").exists()
    assert "| fp32 | layer | failed |" in (tmp_path / "out" / "results.md").read_text()
    assert "note: layer: failed: ValueError: no checkpoints here" in capsys.readouterr().out


def request(tmp_path: Path, family: str = "sd3", **keys) -> child.Request:
    return child.Request(
        mode="config",
        keys={},
        file="config.json",
        values={"model_family": family, **keys},
        overrides={},
        families=[],
        tiny=True,
        steps=1,
        warmup=1,
        device="cpu",
        record=str(tmp_path / "record"),
    )


def test_what_a_model_cannot_do_is_unsupported(tmp_path):
    cell = child.answer(request(tmp_path, "sd1x", gradient_checkpointing_backend="torch-ffn"))
    assert cell.status == "unsupported"
    assert cell.reason.startswith("`gradient_checkpointing_backend` ")
    cell = child.answer(request(tmp_path, gradient_checkpointing_keep=["nothing"]))
    assert cell.status == "failed"
    assert cell.reason.startswith("`gradient_checkpointing_keep` ")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "OOM"),
        (MemoryError(), "OOM"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "OOM"),
        (RuntimeError("shapes do not match"), "failed"),
    ],
)
def test_what_a_step_raises(tmp_path, monkeypatch, error, status):
    def step(self):
        raise error

    monkeypatch.setattr(child.Training, "step", step)
    cell = child.answer(request(tmp_path))
    assert cell.status == status
    assert cell.reason.startswith(type(error).__name__)


@pytest.mark.parametrize(
    ("ended", "status", "reason"),
    [
        (-signal.SIGKILL, "OOM", "killed"),
        (-signal.SIGSEGV, "failed", "signal SIGSEGV: last words"),
        (1, "failed", "exit code 1: last words"),
        (None, "failed", "timeout: not done in 5 s"),
    ],
)
def test_a_child_that_says_nothing(tmp_path, monkeypatch, ended, status, reason):
    def run(request, output, timeout):
        output.write(b"first\nlast words\n")
        return ended

    monkeypatch.setattr(running, "_run", run)
    made = running.Bench(tmp_path, {"none": {}}, {"none": {}}, {}, {}, timeout=5)
    cell = made.measure("none")
    assert cell.status == status
    assert reason in cell.reason


def test_a_mode_that_the_estimator_calls_impossible_is_not_started(tmp_path):
    made = running.Bench(tmp_path, {"x": {}}, {"x": {}}, {}, {}, impossible={"x": "it cannot"})
    assert (made.measure("x").status, made.measure("x").reason) == ("unsupported", "it cannot")


def test_one_sentence_for_bad_input(tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert bench.main(command_line(tmp_path, *arguments)) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "no mode intervall2; did you mean interval2?" in refused("--modes", "intervall2")
    assert refused("--batch", "3").endswith("--tiny has sizes of its own; leave out --batch")
    assert "did you mean" in refused("--family", "sd33")
    assert "--device nonsense" in refused("--device", "nonsense")
    if not torch.cuda.is_available():
        assert refused("--device", "cuda:3").endswith("there is none here; write cpu")
    (tmp_path / "out").write_text("a file")
    assert "out/results.jsonl: " in refused("--modes", "none")
    assert bench.main([str(tmp_path / "missing.json")]) == 2
    assert "No such file" in capsys.readouterr().out
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"model_family": "sd3", "gradient_checkpointing_interval": 0}')
    assert bench.main([str(wrong)]) == 1
    assert f"{wrong}:1:25: SEG204 error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (os, "fsync", "results.jsonl cannot be written"),
        (Path, "write_text", "out: table and picture"),
    ],
)
def test_results_that_cannot_be_written(tmp_path, stub, capsys, monkeypatch, owner, name, where):
    def fail(*_):
        raise OSError(28, "No space left on device")

    argv = command_line(tmp_path, "--modes", "none")
    monkeypatch.setattr(owner, name, fail)
    assert bench.main(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"segckpt bench: {tmp_path}")
    assert said.endswith(f"{where}: No space left on device")


def cell(mode: str, seconds: list[float], mib: float, interval: int = 1, recomputed: int = 5):
    return Cell(
        mode=mode,
        keys={"gradient_checkpointing_interval": interval},
        status="measured",
        seconds=tuple(seconds),
        peak_bytes=int(mib * 2**20),
        recomputed=recomputed,
        blocks=5,
    )


def test_median_and_spread():
    one = cell("layer", [5.0, 1.0, 2.0, 3.0, 4.0], 1)
    assert (one.median, one.spread) == (3.0, 1.0)
    assert cell("layer", [5.0], 1).spread == 0.0


def test_pairs_without_effect():
    layer = cell("layer", [1.0, 1.1, 1.2], 1000)
    same = cell("interval2", [1.04, 1.14, 1.24], 1004, interval=2)
    assert without_effect([layer, same]) == [("layer", "interval2")]
    slower = cell("interval2", [1.2, 1.3, 1.4], 1004, interval=2)
    larger = cell("interval2", [1.0, 1.1, 1.2], 1006, interval=2)
    asked_the_same = cell("config", [1.0, 1.1, 1.2], 1000)
    not_measured = Cell(mode="none", status="OOM")
    for other in (slower, larger, asked_the_same, not_measured):
        assert without_effect([layer, other]) == []
    ran_otherwise = cell("config", [1.0, 1.1, 1.2], 1000, recomputed=3)
    assert without_effect([layer, ran_otherwise]) == [("layer", "config")]


def test_keeping_that_takes_longer_than_recomputing_is_said():
    keep = "gradient_checkpointing_keep"

    def cell(mode, seconds, **keys):
        known = {keep: [], "gradient_checkpointing_backend": "torch"}
        return Cell(mode=mode, status="measured", seconds=seconds, keys=known | keys)

    layer = cell("layer", [1.0, 1.1, 1.2])
    slow, within_noise = [2.9, 3.0, 3.1], [1.1, 1.2, 1.3]
    kept = cell("layer+keep-attention", slow, **{keep: ["attention"]})
    assert slower_for_keeping([layer, kept]) == [("layer+keep-attention", "layer")]
    [said] = tables.reasons([layer, kept])
    assert said.startswith("layer+keep-attention: takes longer than layer, which recomputes what")
    assert "bound by the host" in said
    for other in (
        cell("layer+keep-attention", within_noise, **{keep: ["attention"]}),
        cell("layer+unsloth", slow, gradient_checkpointing_backend="unsloth"),
        cell("both", slow, **{keep: ["ffn"], "gradient_checkpointing_backend": "unsloth"}),
    ):
        assert slower_for_keeping([layer, other]) == []
    assert "keep gains nothing" in TINY_NOTE  # where nothing is there to compare with


@pytest.mark.parametrize(
    ("gib", "unit", "shown"), [(17.259, "GiB", "17.26"), (1.5e-3, "MiB", "1.54")]
)
def test_peaks_are_in_a_unit_that_suits_them(gib, unit, shown, tmp_path):
    seconds = (1.0, 1.1)
    most, least = int(gib * 2**30), int(gib * 2**29)
    cells = [
        Cell(mode="none", status="measured", seconds=seconds, peak_bytes=most, blocks=3),
        Cell(mode="layer", status="measured", seconds=seconds, peak_bytes=least, blocks=3),
    ]
    found = tables.Results("model", "device", "fp32", "some steps", cells)
    assert f"peak {unit}" in tables.columns(found)
    document = tables.markdown(found)
    assert f"(median) / peak {unit}." in document
    assert f"| fp32 | none | 1.050 / {shown} |" in document
    assert "GiB" not in document or unit == "GiB"
    drawn = picture.terminal(points_of(cells))
    assert drawn[0] == f"peak {unit}"
    assert drawn[1].split()[0] == f"{float(shown):.3g}"
    axes = []

    class Seen(Figure):
        def savefig(self, path):
            axes.append((self.axes[0].get_ylabel(), self.axes[0].get_ylim()[1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure", Seen)
        assert picture.draw(points_of(cells), [], "title", tmp_path / "x.png")
    [(label, top)] = axes
    assert label == f"peak {unit}"
    assert float(shown) <= top < 1.2 * float(shown)


def test_the_pareto_front():
    points = [
        Point("layer", 3.0, 1.0),
        Point("none", 1.0, 9.0),
        Point("worse", 3.5, 4.0),
        Point("between", 2.0, 4.0),
        Point("same memory", 2.5, 4.0),
    ]
    assert [point.mode for point in front(points)] == ["none", "between", "layer"]
    assert front([]) == []


def test_the_plot_of_characters():
    points = [
        Point("none", 1.0, 9.0 * GIB),
        Point("layer", 2.0, 1.0 * GIB),
        Point("worse", 2.0, 9.0 * GIB),
    ]
    drawn = picture.terminal(points, [Point("none", 1.5, 5.0 * GIB)], width=11, height=5)
    assert drawn == [
        "peak GiB",
        "9 |A         c",
        "  |",
        "  |     .",
        "  |",
        "1 |          B",
        "  +-----------",
        "   12 s for a step",
        "A none",
        "B layer",
        "c worse",
        "capitals: Pareto front; dots: predicted",
    ]
    together = picture.terminal([Point(mode, 1.0, GIB) for mode in "ab"], width=11, height=3)
    assert together[2] == "  |     Ab"
    assert picture.terminal([]) == []


def test_labels_cover_nothing():
    dots = [(100.0, 100.0), (102.0, 100.0), (104.0, 100.0), (130.0, 100.0)]
    texts = ["seg2-stride4", "seg2-stride4+offload", "layer"]
    placed = picture.labels(texts, dots, (0.0, 0.0, 300.0, 200.0))
    boxes = [
        (x + dx, y + dy, x + dx + 0.5 * picture.SIZE * len(text), y + dy + picture.SIZE)
        for text, (x, y), (dx, dy) in zip(texts, dots, placed, strict=False)
    ]
    for number, box in enumerate(boxes):
        assert not any(picture._overlap(box, other) for other in boxes[:number])
        assert not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in dots)


def test_small_figures_keep_their_digits():
    assert [tables.seconds(value) for value in (1.0223, 0.0134, 0.0)] == [
        "1.022",
        "0.0134",
        "0.000",
    ]


def test_cards_by_the_names_that_drivers_give_them():
    assert predicting.card_of("NVIDIA H100 80GB HBM3").title == "NVIDIA H100 80GB"
    assert predicting.card_of("NVIDIA H100 PCIe").title == "NVIDIA H100 PCIe"
    assert predicting.card_of("CPU, 2 threads") is None
